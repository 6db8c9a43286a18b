"""``torch.distributed`` without peers: every communication becomes a record for one hook."""
