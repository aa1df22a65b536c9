"""Regathering: the trainer's shards into another layout, rectangle by rectangle, without ever making a full tensor."""
