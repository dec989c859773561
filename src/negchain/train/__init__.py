"""The trainer: configuration, presets, run folders and checkpoints."""
