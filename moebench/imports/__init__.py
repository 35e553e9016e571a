"""Other tools' files into moebench's own: a model's config.json, logs of nccl-tests, the logits of a router."""
