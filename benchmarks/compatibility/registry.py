"""Every client: its script in `clients/`, where it runs, and which protocol it speaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.compatibility.environments import Environment, Npm, Programs, Venv

Protocol = Literal["openai", "anthropic", "kserve", "http"]


@dataclass(frozen=True)
class Client:
    """One client.

    Attributes:
        name: what `CLIENTS=` and the results call it.
        title: what the page calls it.
        script: in `clients/`.
        speaks: servers that speak it too are asked.
        limit_s: bound on all of its checks together.
    """

    name: str
    title: str
    script: str
    environment: Environment
    speaks: Protocol
    limit_s: float = 300.0


CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
TRITON = Venv("triton", ("tritonclient[all]==2.73.0",))

# Those that take minutes come last.
CLIENTS: tuple[Client, ...] = (
    Client("openai-python", "openai (Python)", "openai_python.py", Venv("openai", ("openai==3.54.0",)), "openai", 600),
    Client("openai-node", "openai (Node.js)", "openai_node.cjs", Npm("node", ("openai@7.57.0", "zod@4.6.7")), "openai"),
    Client("langchain", "langchain-openai", "langchain.py", Venv("langchain", ("langchain-openai==1.7.3",)), "openai"),
    Client(
        "llama-index",
        "LlamaIndex OpenAILike",
        "llama_index_like.py",
        Venv("llama-index", ("llama-index-llms-openai-like==0.8.1", "llama-index-embeddings-openai-like==0.4.0")),
        "openai",
    ),
    Client("litellm", "LiteLLM (SDK)", "litellm_sdk.py", Venv("litellm", ("litellm[mcp]==1.106.2",)), "openai"),
    Client("cohere", "Cohere (Python)", "cohere_rerank.py", Venv("cohere", ("cohere==7.3.1",)), "openai"),
    Client("instructor", "Instructor", "instructor_sdk.py", Venv("instructor", ("instructor==1.17.0",)), "openai"),
    Client(
        "pydantic-ai",
        "Pydantic AI",
        "pydantic_agents.py",
        Venv("pydantic-ai", ("pydantic-ai-slim[openai]==2.68.0",)),
        "openai",
    ),
    Client(
        "openai-agents",
        "OpenAI Agents SDK",
        "openai_agents_sdk.py",
        Venv("openai-agents", ("openai-agents==0.24.0",)),
        "openai",
    ),
    Client(
        "vercel-ai",
        "Vercel AI SDK",
        "vercel_ai.cjs",
        Npm("vercel", ("ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/openai-compatible@2.0.91", "zod@4.6.7")),
        "openai",
    ),
    Client(
        "langchain-js",
        "LangChain.js, LangGraph",
        "langchain_js.cjs",
        Npm(
            "langchain-js",
            ("@langchain/openai@1.5.8", "@langchain/langgraph@1.7.3", "@langchain/core@1.4.0", "zod@4.6.7"),
        ),
        "openai",
    ),
    Client(
        "smolagents", "smolagents", "smolagents_sdk.py", Venv("smolagents", ("smolagents[openai]==1.26.0",)), "openai"
    ),
    Client(
        "haystack",
        "Haystack",
        "haystack_generators.py",
        Venv("haystack", ("haystack-ai==3.4.0",)),
        "openai",
    ),
    Client(
        "autogen",
        "AutoGen",
        "autogen_agents.py",
        Venv("autogen", ("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5")),
        "openai",
    ),
    Client("anthropic", "Anthropic SDK", "anthropic_sdk.py", Venv("anthropic", ("anthropic==2.14.0",)), "anthropic"),
    Client(
        "anthropic-node",
        "Anthropic SDK (Node.js)",
        "anthropic_node.cjs",
        Npm("anthropic-node", ("@anthropic-ai/sdk@1.14.0", "zod@4.6.7")),
        "anthropic",
    ),
    Client("crewai", "CrewAI", "crewai_crews.py", Venv("crewai", ("crewai==1.15.30",)), "openai"),
    Client(
        "outlines", "Outlines", "outlines_sdk.py", Venv("outlines", ("outlines==1.3.3", "openai==2.54.0")), "openai"
    ),
    Client("llm", "llm (CLI)", "llm_cli.py", Venv("llm", ("llm==0.36",)), "openai"),
    Client("browser", "a web page in Chromium", "browser_page.py", Programs((CHROMIUM,)), "http"),
    Client("java", "Java HttpClient", "HttpClientChecks.java", Programs((("java",),), runner=("java",)), "http"),
    Client("curl", "curl", "curl_commands.py", Programs((("curl",),)), "http"),
    Client("nginx", "nginx in front", "nginx_front.py", Programs((("nginx",), ("curl",))), "http"),
    Client("triton-http", "tritonclient (HTTP)", "triton_http.py", TRITON, "kserve"),
    Client("triton-grpc", "tritonclient (gRPC)", "triton_grpc.py", TRITON, "kserve"),
    Client("kserve-http", "KServe V2 by hand", "kserve_http.py", Programs(()), "kserve"),
    Client(
        "guidellm",
        "GuideLLM",
        "guidellm_load.py",
        Venv(
            "guidellm", ("torch==2.13.0", "guidellm==0.8.1")
        ),  # an older torch than it would take: a CPU build is enough
        "openai",
    ),
    Client("vllm-bench", "vllm bench serve", "vllm_bench.py", Programs(()), "openai"),
    Client("aiperf", "AIPerf", "aiperf_load.py", Venv("aiperf", ("aiperf==0.13.0",)), "openai"),
    Client(
        "lm-eval",
        "lm-evaluation-harness",
        "lm_eval_tasks.py",
        Venv("lmeval", ("lm-eval[api]==0.4.13", "transformers==5.23.0")),
        "openai",
        600,
    ),
)


def client(name: str) -> Client:
    """Return a client by its name.

    Raises:
        KeyError: there is none; the message lists all.
    """
    for one in CLIENTS:
        if one.name == name:
            return one
    raise KeyError(f"no client {name}; there are {', '.join(one.name for one in CLIENTS)}")
