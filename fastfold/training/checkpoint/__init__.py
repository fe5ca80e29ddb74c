"""What a run saves and continues from: where checkpoints lie, what each of them holds, and whether it is whole."""
