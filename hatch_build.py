"""Put conf/, kernels/ and profiles/ into the wheel under `mtrain_cli`.

This needs a hook: `force-include` in pyproject.toml would also fill editable installs. Their
site-packages would then have a folder `mtrain_cli` without code, which hides the checkout. An
editable install finds the three folders in the checkout.
"""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Resources(BuildHookInterface):
    """Adds the resource folders to wheels."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            build_data["force_include"].update(
                {name: f"mtrain_cli/{name}" for name in ("conf", "kernels", "profiles")}
            )
