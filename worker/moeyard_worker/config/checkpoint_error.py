"""The error for a checkpoint that cannot be served. Pure."""


class CheckpointError(ValueError):
    """One line that names the file, the key in it, and what is supported instead."""
