"""Compile the kernel of `selection` for a GPU that need not be here, in all forms."""

from __future__ import annotations

from mtrain_cli.kernels.triton import selection
from triton import compile as compiled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# A launch makes tensors that are None, and numbers that are 1, constants.
FORMS = {
    "pairs": {},
    "numbers": {"KEPT": None},
    "flags": {"NUMBERS": None, "width": 1, "n": 1},
}
POINTERS = {"NUMBERS": "*i64", "KEPT": "*i1", "ORDER": "*i64", "TOTAL": "*i64"}

for form, missing in FORMS.items():
    for share, width in ((0.9, 64), (None, 8192), (0.9, 1)):
        constants = {"SHARE": share, "CROSSING": width > 1, "NUMBER_BITS": 24, "MASS_BITS": 38}
        constants |= {"WIDTH": width, "FORM": form, **missing}
        names = selection._select.arg_names
        types = dict.fromkeys(names, "i32") | POINTERS | dict.fromkeys(constants, "constexpr")
        types["SHARES"] = "*i64" if share else "*fp32"
        source = ASTSource(
            fn=selection._select,
            signature={name: types[name] for name in names},
            constexprs={name: constants[name] for name in names if name in constants},
        )
        options = {"num_warps": max(1, min(16, width // 256))}
        made = compiled(source, target=GPUTarget("cuda", 90, 32), options=options)
        print(form, share, "0d3FECCCCCCCCCCCCD" in made.asm["ptx"])
