"""Cohere's SDK: rerank, in both versions of its API."""

from __future__ import annotations

import cohere
from checking import Checks, Server, refused

checks = Checks(("cohere",))
QUERY = "What is the capital of France?"
TEXTS = ["Cats sleep.", "Paris is the capital of France.", "Interest rates rose."]


@checks.that("v2 rerank: the nearest first, top_n")
def rerank(server: Server) -> None:
    model = server.wants(server.ranker, "ranks")
    client = cohere.ClientV2(api_key=server.key, base_url=server.embeddings_url)
    reply = client.rerank(model=model, query=QUERY, documents=TEXTS, top_n=2)
    assert reply.results[0].index == 1
    assert len(reply.results) == 2
    assert reply.results[0].relevance_score > reply.results[1].relevance_score


@checks.that("v1 rerank")
def rerank_v1(server: Server) -> None:
    model = server.wants(server.ranker, "ranks")
    client = cohere.Client(api_key=server.key, base_url=server.embeddings_url)
    reply = client.rerank(model=model, query=QUERY, documents=TEXTS)
    assert reply.results[0].index == 1
    assert len(reply.results) == 3


@checks.that("errors: an unknown model, a wrong key")
def errors(server: Server) -> None:
    server.wants(server.ranker, "ranks")
    client = cohere.ClientV2(api_key=server.key, base_url=server.embeddings_url)
    refused(cohere.core.api_error.ApiError, lambda: client.rerank(model="none", query=QUERY, documents=TEXTS))
    stranger = cohere.ClientV2(api_key="wrong", base_url=server.embeddings_url)
    refused(
        cohere.core.api_error.ApiError,
        lambda: stranger.rerank(model=server.ranker, query=QUERY, documents=TEXTS),
    )


checks.run()
