"""Models: Hugging Face configs as Megatron models, and where every weight lives in each framework's layout."""
