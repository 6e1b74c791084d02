"""Tests that need NVIDIA GPUs: each file is marked `gpu`, and a machine with fewer GPUs deselects it."""
