"""From prepared text to a trained model: recipes, the loop, checkpoints, several processes."""
