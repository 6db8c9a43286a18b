"""Compiles the null device's extension with the package, where torch and a compiler are there.

pip builds in an environment of its own, which has no torch: then nothing is compiled here, and the
first run on the null device does it. With ``pip install --no-build-isolation`` the torch that is
installed is the torch that the extension is for. What is compiled goes into the package; an
editable install, whose sources change, has it in the user's cache.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).with_name("src")))

from prismscale.devices.null import build
from prismscale.errors import PrismscaleError


def can_compile() -> bool:
    """Whether there is a torch to compile for, and something to compile with."""
    return build.has_torch() and build.find_compiler() is not None


class BuildWithExtension(build_py):
    """Adds the compiled extension to the package."""

    def run(self) -> None:
        """Copy the package; compile where it can be done."""
        super().run()
        if not can_compile():
            return
        package = Path(self.build_lib) / "prismscale" / "devices" / "null"
        try:
            if self.editable_mode:
                build.build_extension()
            else:
                build.build_for_package(package / build.INSTALLED.name)
        except PrismscaleError as error:
            # Everything but the null device works without; its first use says this again.
            print(f"warning: {error}", file=sys.stderr)


class Platform(Distribution):
    """A wheel for one platform only where it has the extension."""

    def has_ext_modules(self) -> bool:
        """Whether something is compiled."""
        return can_compile()


setup(cmdclass={"build_py": BuildWithExtension}, distclass=Platform)
