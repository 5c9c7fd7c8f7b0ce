"""Gym's simple agent, its resources server with a weather tool and our model server, in one process without Ray.

Runs in NeMo Gym's environment; the first line of the output is the URL of the agent server. The weather's reward is
replaced by one that depends on the episode: whether the tool was called, and the number of outputs.
"""

import asyncio
import os
import socket
import sys
from pathlib import Path

import uvicorn
from omegaconf import OmegaConf

TOOLS = Path(__file__).parents[3] / "tools" / "nemo_gym" / "responses_api_models" / "verl_mg_policy"
KINDS = {"agent": "responses_api_agents", "weather": "resources_servers", "policy_model": "responses_api_models"}


def main() -> None:
    sockets = {name: socket.create_server(("127.0.0.1", 0)) for name in KINDS}
    configuration = {
        name: {kind: {"server": {"host": "127.0.0.1", "port": sockets[name].getsockname()[1], "entrypoint": "app.py"}}}
        for name, kind in KINDS.items()
    }
    agent = configuration["agent"]["responses_api_agents"]["server"]
    agent["resources_server"] = {"type": "resources_servers", "name": "weather"}
    agent["model_server"] = {"type": "responses_api_models", "name": "policy_model"}
    os.environ["NEMO_GYM_CONFIG_DICT"] = OmegaConf.to_yaml(configuration)
    sys.path.insert(0, str(TOOLS))

    from app import PolicyModel  # ours
    from nemo_gym.base_resources_server import BaseVerifyRequest, BaseVerifyResponse
    from nemo_gym.config_types import BaseServerConfig
    from nemo_gym.server_utils import ServerClient
    from resources_servers.example_single_tool_call.app import SimpleWeatherResourcesServer
    from responses_api_agents.simple_agent.app import SimpleAgent

    class Response(BaseVerifyResponse):
        outputs: int

    class Weather(SimpleWeatherResourcesServer):
        async def verify(self, body: BaseVerifyRequest) -> Response:
            calls = [item for item in body.response.output if item.type == "function_call"]
            return Response(**body.model_dump(), reward=float(len(calls)), outputs=len(body.response.output))

    unused = BaseServerConfig(host="127.0.0.1", port=1)
    client = ServerClient(head_server_config=unused, global_config_dict=OmegaConf.create(configuration))
    servers = []
    for name, server_class in (("agent", SimpleAgent), ("weather", Weather), ("policy_model", PolicyModel)):
        content = {**configuration[name][KINDS[name]]["server"], "name": name}
        if name == "weather":
            content |= {"domain": "agent"}
        config = server_class.model_fields["config"].annotation.model_validate(content)
        server = server_class(config=config, server_client=client)
        app = server.setup_webserver()
        server.setup_exception_middleware(app)
        servers.append(uvicorn.Server(uvicorn.Config(app, log_level="warning")).serve(sockets=[sockets[name]]))
    print(f"http://127.0.0.1:{sockets['agent'].getsockname()[1]}", flush=True)

    async def serve() -> None:
        await asyncio.gather(*servers)

    asyncio.run(serve())


if __name__ == "__main__":
    main()
