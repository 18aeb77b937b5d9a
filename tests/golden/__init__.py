"""Golden traces: what mtrain computed when these files were recorded, held against what it computes now.

    python -m golden check              # from tests/; every case, with tolerances, since CPUs round differently
    python -m golden check --exact      # every case, every bit: on the machine that recorded, before and after a change
    python -m golden check --only losses        # a group, the beginning of "GROUP/NAME", or a part of names
    python -m golden record [--only TEXT]       # replace what was recorded
    python -m golden record --files     # also make the old checkpoint and profile anew

Groups: losses (tiny trainings, step by step), memory (bytes of dry runs), predictions (simulated times, exact work and bytes), profiles
(rows of recorded steps), files (an old checkpoint and old profiles). `python -m pytest tests/golden` checks a part of each, `-m slow` all.

Names: only `reach` knows how the product calls things. After a rename, change `reach` and record nothing: the check must pass as it is.

Record again only where a change is meant to compute something else, and say in the commit which numbers move and why: for new arithmetic
the losses, for a corrected estimate the memory. The checkpoint and the profile in files/ stay as long as mtrain promises to read them; a new
format gets new files. New cases are recorded alone, by --only.

Losses depend on torch's version as well as on the CPU: `--exact` holds for the versions that recorded (recorded/versions.json).
"""
