"""What a check of `moeyard doctor` says."""

from dataclasses import asdict, dataclass
from typing import Any

OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`level`: a problem keeps the server from starting or serving, a warning makes it slow or will bite later.

    `advice` is what to do about it, "" of what is ok.
    """

    subject: str
    level: str
    text: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.level:<8}{self.subject:<12}{self.text}" + (f"; {self.advice}" if self.advice else "")

    def as_json(self) -> dict[str, Any]:
        """Its fields."""
        return asdict(self)


def ok(subject: str, text: str) -> Finding:
    """Nothing to do."""
    return Finding(subject=subject, level=OK, text=text)


def warning(subject: str, text: str, advice: str) -> Finding:
    """Serves, but."""
    return Finding(subject=subject, level=WARNING, text=text, advice=advice)


def problem(subject: str, text: str, advice: str) -> Finding:
    """Does not serve."""
    return Finding(subject=subject, level=PROBLEM, text=text, advice=advice)
