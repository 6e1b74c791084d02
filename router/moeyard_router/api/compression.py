"""`kv_compression` of a request: what the model keeps of its prompt for the answer."""

from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from moeyard_router.api.fields import Strict
from moeyard_worker.protocol import KvCompression

# Beyond all prompts, and within what goes over the wire.
_Count = Annotated[int, Field(ge=1, lt=2**31)]


class KvCompressionField(Strict):
    """`method` "none" keeps all where the server's default does not; "snapkv" keeps `budget` tokens of the prompt."""

    method: Literal["snapkv", "none"]
    budget: _Count | None = None
    window: _Count | None = None

    @model_validator(mode="after")
    def _fits(self) -> "KvCompressionField":
        if self.method == "none":
            return self
        if self.budget is None:
            raise PydanticCustomError("budget", "method snapkv needs a budget, in tokens of the prompt")
        window = self.asked().window
        if window > self.budget:
            raise PydanticCustomError(
                "window",
                "the window of {window} tokens is always kept, and the budget is {budget}",
                {"window": window, "budget": self.budget},
            )
        return self

    def asked(self) -> KvCompression:
        """What the worker is told, of a method other than "none"."""
        assert self.budget is not None, "checked above"
        if self.window is None:
            return KvCompression(method=self.method, budget=self.budget)
        return KvCompression(method=self.method, budget=self.budget, window=self.window)


def compression_of(field: KvCompressionField | None, usual: KvCompression | None) -> KvCompression | None:
    """What a request asks for, or else the server's default."""
    if field is None:
        return usual
    return None if field.method == "none" else field.asked()
