"""Model server of NeMo Gym (nemo-gym 0.4) whose model is that of the sample; runs in Gym's Python environment.

    cd tools/nemo_gym
    gym env start "+config_paths=[responses_api_models/verl_mg_policy/configs/verl_mg_policy.yaml,MY_RESOURCES.yaml]"

Gym's own model servers have one URL for all requests. The agent `verl_mg.recipes.environments.nemo_gym` writes
the sample's URL and key into the metadata of the request, which agents of Gym pass on to their model server.
"""

from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, SimpleResponsesAPIModel
from nemo_gym.openai_utils import (
    NeMoGymAsyncOpenAI,
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)

BASE_URL, API_KEY, MODEL = "verl_mg_base_url", "verl_mg_api_key", "verl_mg_model"


class PolicyModel(SimpleResponsesAPIModel):
    """Sends each request to the URL in its metadata."""

    config: BaseResponsesAPIModelConfig

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
        """Answers a request of the responses API."""
        policy, fields = _addressed(body.model_dump(exclude_unset=True))
        return NeMoGymResponse.model_validate(await policy.create_response(**fields))

    async def chat_completions(self, body: NeMoGymChatCompletionCreateParamsNonStreaming) -> NeMoGymChatCompletion:
        """Answers a request of chat completions."""
        policy, fields = _addressed(body.model_dump(exclude_unset=True))
        return NeMoGymChatCompletion.model_validate(await policy.create_chat_completion(**fields))


def _addressed(body: dict) -> tuple[NeMoGymAsyncOpenAI, dict]:
    """The client of the sample's endpoint, and the request without its address."""
    metadata = dict(body.get("metadata") or {})
    if BASE_URL not in metadata:
        raise ValueError(f"metadata: the request has no {BASE_URL}, by which it reaches the policy of its sample")
    client = NeMoGymAsyncOpenAI(base_url=metadata.pop(BASE_URL), api_key=metadata.pop(API_KEY))
    return client, {**body, "model": metadata.pop(MODEL), "metadata": metadata}


if __name__ == "__main__":
    PolicyModel.run_webserver()
