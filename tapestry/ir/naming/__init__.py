"""What a model's author calls its operations, weights and dimensions."""
