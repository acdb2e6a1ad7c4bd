// OpenAI's SDK for Node.js.
"use strict";
const OpenAI = require("openai");
const { zodResponseFormat } = require("openai/helpers/zod");
const { z } = require("zod");
const { NotRun, assert, cameOverTime, run, server } = require("./checking.cjs");

const client = new OpenAI({ baseURL: `${server.url}/v1`, apiKey: server.key, maxRetries: 0, timeout: 80_000 });
const embedder = new OpenAI({ baseURL: `${server.embeddings_url}/v1`, apiKey: server.key, maxRetries: 0 });
const story = [{ role: "user", content: "Tell a story of the sea." }];
const question = [{ role: "user", content: "What is the weather in Paris?" }];
const Person = z.object({ name: z.enum(["Ada", "Grace"]), age: z.number().int().min(10).max(99) });
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    strict: true,
    parameters: {
      type: "object",
      properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};
const named = { type: "function", function: { name: "get_weather" } };

const checks = {
  "chat": async () => {
    const reply = await client.chat.completions.create({ model: server.model, messages: question, max_tokens: 12 });
    assert.ok(reply.choices[0].message.content);
    assert.equal(reply.usage.total_tokens, reply.usage.prompt_tokens + reply.usage.completion_tokens);
  },
  "chat stream: pieces over time": async () => {
    const times = [];
    const stream = await client.chat.completions.create({
      model: server.model, messages: story, max_tokens: 60, temperature: 0, stream: true,
    });
    for await (const chunk of stream) if (chunk.choices[0]?.delta?.content) times.push(performance.now());
    cameOverTime(times);
  },
  "chat stream: aborted, and the next request is served": async () => {
    const stream = await client.chat.completions.create({
      model: server.model, messages: story, max_tokens: 400, stream: true,
    });
    for await (const chunk of stream) { stream.controller.abort(); break; }
    const reply = await client.chat.completions.create({ model: server.model, messages: question, max_tokens: 4 });
    assert.ok(reply.choices[0].message.content);
  },
  "completions": async () => {
    const reply = await client.completions.create({
      model: server.model, prompt: "The capital of France is", max_tokens: 6, temperature: 0,
    });
    assert.match(reply.choices[0].text, /Paris/);
  },
  "response_format: json_schema by parse() and zod": async () => {
    const reply = await client.chat.completions.parse({
      model: server.model, messages: [{ role: "user", content: "Invent a person." }],
      response_format: zodResponseFormat(Person, "person"), max_tokens: 80, temperature: 0,
    });
    assert.ok(Person.parse(reply.choices[0].message.parsed));
  },
  "tools: runTools() calls a function and ends with an answer": async () => {
    const asked = [];
    const runner = client.chat.completions.runTools({
      model: server.model, messages: question, max_tokens: 60, temperature: 0,
      tool_choice: named,
      tools: [{ type: "function", function: {
        ...weather.function, parse: JSON.parse, function: (told) => { asked.push(told.city); return "clear"; },
      } }],
    });
    await runner.done();
    assert.ok(["Paris", "Rome"].includes(asked[0]), String(asked));
  },
  "tools: streamed": async () => {
    let told = "";
    const stream = await client.chat.completions.create({
      model: server.model, messages: question, tools: [weather], tool_choice: named, max_tokens: 60, stream: true,
    });
    for await (const chunk of stream) {
      for (const call of chunk.choices[0]?.delta?.tool_calls ?? []) told += call.function?.arguments ?? "";
    }
    assert.ok(["Paris", "Rome"].includes(JSON.parse(told).city), told);
  },
  "logprobs": async () => {
    const reply = await client.chat.completions.create({
      model: server.model, messages: question, max_tokens: 4, logprobs: true, top_logprobs: 2,
    });
    const told = reply.choices[0].logprobs.content;
    assert.equal(told.map((item) => item.token).join(""), reply.choices[0].message.content);
  },
  "responses: create and stream": async () => {
    const reply = await client.responses.create({ model: server.model, input: "Say hello.", max_output_tokens: 16 });
    assert.ok(reply.output_text);
    const times = [];
    const stream = await client.responses.create({
      model: server.model, input: "Tell a story of the sea.", max_output_tokens: 24, stream: true,
    });
    for await (const event of stream) if (event.type === "response.output_text.delta") times.push(performance.now());
    cameOverTime(times);
  },
  "embeddings": async () => {
    if (!server.embeddings_model) throw new NotRun("this server has no embedding model");
    const reply = await embedder.embeddings.create({ model: server.embeddings_model, input: ["A cat.", "A dog."] });
    assert.deepEqual(reply.data.map((item) => item.embedding.length), [384, 384]);
  },
  "files and batches": async () => {
    const line = JSON.stringify({
      custom_id: "one", method: "POST", url: "/v1/chat/completions",
      body: { model: server.model, messages: question, max_tokens: 4 },
    });
    const file = await client.files.create({
      file: await OpenAI.toFile(Buffer.from(line), "in.jsonl"), purpose: "batch",
    });
    let batch = await client.batches.create({
      input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h",
    });
    while (["validating", "in_progress", "finalizing"].includes(batch.status)) {
      await new Promise((done) => setTimeout(done, 500));
      batch = await client.batches.retrieve(batch.id);
    }
    assert.equal(batch.status, "completed");
    const text = await (await client.files.content(batch.output_file_id)).text();
    assert.equal(JSON.parse(text).custom_id, "one");
  },
  "errors are typed": async () => {
    const ask = (more, sdk = client) =>
      sdk.chat.completions.create({ model: server.model, messages: question, max_tokens: 4, ...more });
    await assert.rejects(ask({ temperature: 9 }), OpenAI.BadRequestError);
    await assert.rejects(ask({ model: "none" }), OpenAI.NotFoundError);
    const stranger = new OpenAI({ baseURL: `${server.url}/v1`, apiKey: "wrong", maxRetries: 0 });
    await assert.rejects(ask({}, stranger), OpenAI.AuthenticationError);
  },
};

const { version, VERSION } = require("openai/version");
run(checks, { openai: version ?? VERSION });
