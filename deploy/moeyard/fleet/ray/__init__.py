"""The adapter between the fleet machine and Ray."""
