"""Reading drafters out of checkpoints in the layout of Hugging Face or MLX, one file per family,
and writing drafter directories."""
