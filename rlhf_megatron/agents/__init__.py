"""An OpenAI-compatible endpoint over the engine of this process, for programs whose turns are trained."""
