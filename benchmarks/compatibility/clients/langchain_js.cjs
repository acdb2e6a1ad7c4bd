// LangChain.js with LangGraph: its chat model, tools and schemas, and a graph that streams.
"use strict";
const { tool } = require("@langchain/core/tools");
const { createReactAgent } = require("@langchain/langgraph/prebuilt");
const { ChatOpenAI, OpenAI, OpenAIEmbeddings } = require("@langchain/openai");
const { z } = require("zod");
const { assert, cameOverTime, run, server } = require("./checking.cjs");

const address = (url) => ({ apiKey: server.key, configuration: { baseURL: `${url}/v1` }, maxRetries: 0 });
const chat = (more) =>
  new ChatOpenAI({ model: server.model, maxTokens: 60, temperature: 0, ...address(server.url), ...more });
const story = "Tell a story of the sea.";
const question = "What is the weather in Paris?";
const Person = z.object({ name: z.enum(["Ada", "Grace"]), age: z.number().int().min(10).max(99) });

function weather(called) {
  const form = { name: "get_weather", description: "The weather.", schema: z.object({ city: z.enum(["Paris", "Rome"]) }) };
  return tool(async ({ city }) => { called.push(city); return "clear"; }, form);
}

async function timesOf(stream, shows) {
  const times = [];
  for await (const piece of stream) if (shows(piece)) times.push(performance.now());
  return times;
}

const checks = {
  "invoke, with usage": async () => {
    const reply = await chat().invoke("Say hello.");
    assert.ok(reply.content);
    assert.ok(reply.usage_metadata.output_tokens > 0);
  },
  "stream, with usage at its end": async () => {
    let usage;
    const stream = await chat({ streamUsage: true }).stream(story);
    cameOverTime(await timesOf(stream, (piece) => { usage = piece.usage_metadata || usage; return piece.content; }));
    assert.ok(usage.output_tokens >= 4);
  },
  "stream: aborted, and the next request is served": async () => {
    const leaving = new AbortController();
    const stream = await chat({ maxTokens: 400 }).stream(story, { signal: leaving.signal });
    await assert.rejects(async () => { for await (const piece of stream) if (piece.content) leaving.abort(); });
    assert.ok((await chat({ maxTokens: 4 }).invoke(question)).content);
  },
  "withStructuredOutput: json_schema": async () => {
    const model = chat({ maxTokens: 120 }).withStructuredOutput(Person, { method: "jsonSchema", strict: true });
    assert.ok(Person.parse(await model.invoke("Invent a person.")));
  },
  "withStructuredOutput: functionCalling": async () => {
    const model = chat({ maxTokens: 120 }).withStructuredOutput(Person, { method: "functionCalling" });
    assert.ok(Person.parse(await model.invoke("Invent a person.")));
  },
  "bindTools: a call by name": async () => {
    const model = chat({ maxTokens: 120 }).bindTools([weather([])], { tool_choice: "get_weather" });
    const [call] = (await model.invoke(question)).tool_calls;
    assert.equal(call.name, "get_weather");
    assert.ok(["Paris", "Rome"].includes(call.args.city), JSON.stringify(call));
  },
  "LangGraph: an agent with a tool": async () => {
    const agent = createReactAgent({ llm: chat(), tools: [weather([])] });
    const { messages } = await agent.invoke({ messages: [{ role: "user", content: question }] }, { recursionLimit: 8 });
    assert.ok(messages.length >= 2);
  },
  "LangGraph: streamMode messages": async () => {
    const agent = createReactAgent({ llm: chat(), tools: [] });
    const asked = { messages: [{ role: "user", content: story }] };
    cameOverTime(await timesOf(await agent.stream(asked, { streamMode: "messages" }), ([piece]) => piece.content));
  },
  "Responses: invoke and stream": async () => {
    assert.ok((await chat({ useResponsesApi: true }).invoke("Say hello.")).text);
    cameOverTime(await timesOf(await chat({ useResponsesApi: true }).stream(story), (piece) => piece.text));
  },
  "completions (OpenAI)": async () => {
    assert.ok(await new OpenAI({ model: server.model, maxTokens: 5, ...address(server.url) }).invoke("Hello"));
  },
  "OpenAIEmbeddings": async () => {
    const embedder = new OpenAIEmbeddings({ model: server.embeddings_model, ...address(server.embeddings_url) });
    assert.equal((await embedder.embedDocuments(["near", "far"])).length, 2);
  },
};

const versions = Object.fromEntries(
  ["@langchain/core", "@langchain/langgraph", "@langchain/openai"].map((name) => [name, require(`${name}/package.json`).version]),
);
run(checks, versions);
