"""One model's compression: buckets, steps, options, agreement between ranks, checkpoints."""
