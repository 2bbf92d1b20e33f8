"""Training of the demo models; `scripts/train_demo.py` is the command."""
