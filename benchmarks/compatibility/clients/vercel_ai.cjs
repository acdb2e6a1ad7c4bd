// Vercel's AI SDK: by its provider for servers that are compatible with OpenAI, and by OpenAI's own (Responses).
"use strict";
const ai = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { z } = require("zod");
const { NotRun, assert, cameOverTime, run, server } = require("./checking.cjs");

const address = { baseURL: `${server.url}/v1`, apiKey: server.key };
const compatible = (more) =>
  createOpenAICompatible({ name: "server", includeUsage: true, supportsStructuredOutputs: true, ...address, ...more });
const chat = compatible()(server.model);
const responses = createOpenAI(address)(server.model);
const story = "Tell a story of the sea.";
const question = "What is the weather in Paris?";
const Person = z.object({ name: z.enum(["Ada", "Grace"]), age: z.number().int().min(10).max(99) });
const once = { maxRetries: 0, temperature: 0 };

function weather(asked) {
  return ai.tool({
    description: "The weather of a city.",
    inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
    execute: async ({ city }) => { asked.push(city); return "clear"; },
  });
}

async function timesOf(stream) {
  const times = [];
  for await (const piece of stream.textStream) if (piece) times.push(performance.now());
  return times;
}

async function callsATool(model) {
  const asked = [];
  const reply = await ai.generateText({
    model, prompt: question, tools: { weather: weather(asked) }, toolChoice: "required", maxOutputTokens: 120, ...once,
  });
  assert.ok(["Paris", "Rome"].includes(asked[0]), String(asked));
  assert.equal(reply.finishReason, "tool-calls");
}

const checks = {
  "generateText": async () => {
    const reply = await ai.generateText({ model: chat, prompt: question, maxOutputTokens: 12, ...once });
    assert.ok(reply.text);
    assert.equal(reply.usage.totalTokens, reply.usage.inputTokens + reply.usage.outputTokens);
  },
  "streamText: pieces over time, usage at the end": async () => {
    const stream = ai.streamText({ model: chat, prompt: story, maxOutputTokens: 60, ...once });
    cameOverTime(await timesOf(stream));
    assert.ok((await stream.usage).outputTokens >= 4);
  },
  "streamText: aborted, and the next request is served": async () => {
    const leaving = new AbortController();
    const stream = ai.streamText({
      model: chat, prompt: story, maxOutputTokens: 400, abortSignal: leaving.signal, onError: () => {}, ...once,
    });
    for await (const piece of stream.textStream) { if (piece) leaving.abort(); }
    assert.ok((await ai.generateText({ model: chat, prompt: question, maxOutputTokens: 4, ...once })).text);
  },
  "completions": async () => {
    const model = compatible().completionModel(server.model);
    const prompt = "The capital of France is";
    const reply = await model.doGenerate({
      prompt: [{ role: "user", content: [{ type: "text", text: prompt }] }], maxOutputTokens: 6, temperature: 0,
    });
    assert.ok(reply.content[0].text);
  },
  "generateObject: a zod schema": async () => {
    const reply = await ai.generateObject({
      model: chat, schema: Person, prompt: "Invent a person.", maxOutputTokens: 120, ...once,
    });
    assert.ok(Person.parse(reply.object));
  },
  "streamObject: an object that fills while it streams": async () => {
    const stream = ai.streamObject({
      model: chat, schema: Person, prompt: "Invent a person.", maxOutputTokens: 120, ...once,
    });
    let seen = 0;
    for await (const _ of stream.partialObjectStream) seen += 1;
    assert.ok(seen >= 2, `${seen} states`);
    assert.ok(Person.parse(await stream.object));
  },
  "tools: called, and its result kept in the history": async () => {
    await callsATool(chat);
    const asked = [];
    const reply = await ai.generateText({
      model: chat, prompt: question, tools: { weather: weather(asked) }, maxOutputTokens: 120, ...once,
      stopWhen: ai.stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
    });
    assert.equal(reply.steps.length, 2);
    assert.ok(reply.text);
  },
  "Responses: text and stream": async () => {
    const reply = await ai.generateText({ model: responses, prompt: question, maxOutputTokens: 16, ...once });
    assert.ok(reply.text);
    cameOverTime(await timesOf(ai.streamText({ model: responses, prompt: story, maxOutputTokens: 60, ...once })));
  },
  "Responses: an object and a tool": async () => {
    const reply = await ai.generateObject({
      model: responses, schema: Person, prompt: "Invent a person.", maxOutputTokens: 120, ...once,
    });
    assert.ok(Person.parse(reply.object));
    await callsATool(responses);
  },
  "embedMany": async () => {
    if (!server.embeddings_model) throw new NotRun("this server has no embedding model");
    const model = compatible({ baseURL: `${server.embeddings_url}/v1` }).embeddingModel(server.embeddings_model);
    const { embeddings } = await ai.embedMany({ model, values: ["A cat.", "A dog."], maxRetries: 0 });
    assert.deepEqual(embeddings.map((embedding) => embedding.length), [384, 384]);
  },
  "errors tell their status": async () => {
    const ask = (model, more) => ai.generateText({ model, prompt: question, maxOutputTokens: 4, maxRetries: 0, ...more });
    const has = (status) => (error) => ai.APICallError.isInstance(error) && error.statusCode === status;
    await assert.rejects(ask(chat, { temperature: 9 }), has(400));
    await assert.rejects(ask(compatible()("none")), has(404));
    await assert.rejects(ask(compatible({ apiKey: "wrong" })(server.model)), has(401));
  },
};

const versions = Object.fromEntries(
  ["ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai"].map((name) => [name, require(`${name}/package.json`).version]),
);
run(checks, versions);
