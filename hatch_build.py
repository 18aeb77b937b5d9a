"""Put conf/, kernels/ and profiles/ into the wheel under `mtrain_cli`.

This needs a hook: `force-include` in pyproject.toml would also fill editable installs. Their
site-packages would then have a folder `mtrain_cli` without code, which hides the checkout. An
editable install finds the three folders in the checkout.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# No command reads these files; they are in the repository and in the sdist.
LEFT_OUT = (".png", ".tar.xz", ".gitkeep", ".pyc")


class Resources(BuildHookInterface):
    """Adds the resource folders to wheels."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        for folder in ("conf", "kernels", "profiles"):
            for path in sorted(Path(self.root, folder).rglob("*")):
                if path.is_file() and not path.name.endswith(LEFT_OUT):
                    name = path.relative_to(self.root).as_posix()
                    build_data["force_include"][name] = f"mtrain_cli/{name}"
