"""Python and the packages that moeyard needs, against what its own metadata asks for."""

import platform
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from moeyard import __version__
from moeyard.clients.doctor.finding import Finding, ok, problem, warning

# Named one by one; of the others only what is wrong is worth a line.
SHOWN = ("torch", "triton", "ray")


def check_software() -> Iterator[Finding]:
    """The interpreter and every requirement of the installed package."""
    try:
        package = metadata.metadata("moeyard")
        requires = metadata.requires("moeyard") or []
    except metadata.PackageNotFoundError:
        yield warning("moeyard", f"{__version__}, not installed", "pip install it, so that its packages are checked")
        return
    yield ok("moeyard", __version__)
    yield check_python(platform.python_version(), package["Requires-Python"] or "")
    yield from check_packages(requires, installed)


def check_python(version: str, wanted: str) -> Finding:
    """Whether this Python is one of those `wanted`."""
    if SpecifierSet(wanted).contains(version, prereleases=True):
        return ok("python", version)
    return problem("python", f"{version}, moeyard wants {wanted}", "make the virtual environment with another one")


def installed(name: str) -> str | None:
    """The version of a package, None if it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_packages(requires: Iterable[str], version_of: Callable[[str], str | None]) -> Iterator[Finding]:
    """Requirements that apply here, extras not among them; those that are met and not in SHOWN share a line."""
    sound = 0
    for requirement in map(Requirement, requires):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = version_of(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            have = "missing" if version is None else version
            yield problem(
                requirement.name,
                f"{have}, moeyard wants {requirement.specifier or 'any'}",
                f"pip install '{requirement.name}{requirement.specifier}'",
            )
        elif requirement.name in SHOWN:
            yield ok(requirement.name, version)
        else:
            sound += 1
    yield ok("packages", f"{sound} others as required")
