"""Serves OpenEnv's reasoning_gym_env to many trajectories at once; the app that comes with it admits one session.

    environment=https://github.com/meta-pytorch/OpenEnv#subdirectory=envs/reasoning_gym_env
    pip install openenv-core==0.3.0 "openenv-reasoning_gym @ git+$environment"
    python -m uvicorn --app-dir recipes/environments openenv_server:app --port 8000

It may run in an environment of its own: openenv_client.py needs openenv-core alone.
"""

from openenv.core.env_server import create_fastapi_app
from reasoning_gym_env.models import ReasoningGymAction, ReasoningGymObservation
from reasoning_gym_env.server.reasoning_gym_environment import ReasoningGymEnvironment

app = create_fastapi_app(ReasoningGymEnvironment, ReasoningGymAction, ReasoningGymObservation, max_concurrent_envs=256)
