"""One model's compression: buckets, steps, options, checkpoints."""
