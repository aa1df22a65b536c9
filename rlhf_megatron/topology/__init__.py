"""Who runs where: layouts (degrees -> process groups), placement, and the mending that Megatron-core needs for both."""
