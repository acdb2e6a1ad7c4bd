// Anthropic's SDK for Node.js.
"use strict";
const Anthropic = require("@anthropic-ai/sdk");
const { betaZodTool } = require("@anthropic-ai/sdk/helpers/beta/zod");
const { zodOutputFormat } = require("@anthropic-ai/sdk/helpers/zod");
const { z } = require("zod");
const { assert, run, server } = require("./checking.cjs");

const at = (more) =>
  new Anthropic({ baseURL: server.url, apiKey: server.key, maxRetries: 0, timeout: 80_000, ...more });
const client = at();
const model = server.model;
const question = [{ role: "user", content: "What is the capital of France?" }];
const asked = [{ role: "user", content: "What is the weather in Paris?" }];
const Person = z.object({ name: z.enum(["Ada", "Grace"]), age: z.number().int() });
const City = z.object({ city: z.enum(["Paris", "Rome"]) });
const weather = { name: "get_weather", description: "The weather of a city.", input_schema: z.toJSONSchema(City) };
const named = { type: "tool", name: "get_weather" };

async function sentBack() {
  const called = await client.messages.create({
    model, max_tokens: 60, messages: asked, tools: [weather], tool_choice: named,
  });
  const call = called.content.at(-1);
  assert.deepEqual([called.stop_reason, call.name], ["tool_use", "get_weather"]);
  City.parse(call.input);
  const back = [
    ...asked,
    { role: "assistant", content: called.content },
    { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "sunny" }] },
  ];
  assert.ok((await client.messages.create({ model, max_tokens: 16, messages: back, tools: [weather] })).content.length);
}

// It asks for a thread first, which the server would hold; where it is told that there are none it goes on without.
async function ranByItself() {
  const cities = [];
  const tool = betaZodTool({
    name: "get_weather", description: "The weather of a city.", inputSchema: City,
    run: ({ city }) => { cities.push(city); return "sunny"; },
  });
  const final = await client.beta.messages.toolRunner({
    model, max_tokens: 60, messages: asked, tools: [tool], tool_choice: named, max_iterations: 2,
  });
  assert.ok(["Paris", "Rome"].includes(cities[0]), String(cities));
  assert.ok(final.content.length);
}

const checks = {
  "messages, whole: text, usage, the request's id": async () => {
    const told = await client.messages.create({ model, max_tokens: 24, messages: question, temperature: 0 });
    assert.ok(told.content[0].text);
    assert.ok(told.usage.input_tokens > 5 && told.usage.output_tokens > 5);
    assert.ok(told._request_id);
  },
  "messages, streamed: the text grows to the final message": async () => {
    let text = "";
    const stream = client.messages.stream({ model, max_tokens: 24, messages: question });
    stream.on("text", (piece) => { text += piece; });
    const final = await stream.finalMessage();
    assert.equal(final.content[0].text, text);
    assert.ok(["end_turn", "max_tokens"].includes(final.stop_reason));
  },
  "a tool called, its result sent back; toolRunner() and zod": async () => {
    await sentBack();
    await ranByItself();
  },
  "an answer by a schema: parse() and zod": async () => {
    const told = await client.messages.parse({
      model, max_tokens: 80, messages: [{ role: "user", content: "A person, as JSON." }],
      output_config: { format: zodOutputFormat(Person) },
    });
    Person.parse(told.parsed_output);
  },
  "an answer that goes on, a stop sequence": async () => {
    const turns = [...question, { role: "assistant", content: "The capital of France is" }];
    const told = await client.messages.create({
      model, max_tokens: 24, messages: turns, stop_sequences: ["Paris"], temperature: 0,
    });
    assert.deepEqual([told.stop_reason, told.stop_sequence], ["stop_sequence", "Paris"]);
  },
  "tokens counted, models listed": async () => {
    assert.ok((await client.messages.countTokens({ model, messages: question })).input_tokens > 5);
    const ids = [];
    for await (const one of client.models.list({ limit: 1 })) ids.push(one.id);
    assert.ok(ids.includes(model), String(ids));
    assert.equal((await client.models.retrieve(model)).id, model);
  },
  "errors: an unknown model, a wrong key, a promise that cannot be kept": async () => {
    const ask = (more, { sdk = client, ...options } = {}) =>
      sdk.messages.create({ model, max_tokens: 4, messages: question, ...more }, options);
    await assert.rejects(ask({ model: "none" }), Anthropic.NotFoundError);
    await assert.rejects(ask({}, { sdk: at({ apiKey: "wrong" }) }), Anthropic.AuthenticationError);
    const soon = { headers: { "x-overspill-deadline-ms": "1" } };
    await assert.rejects(ask({ max_tokens: 99 }, soon), Anthropic.APIError);
  },
};

run(checks, { "@anthropic-ai/sdk": require("@anthropic-ai/sdk/version").VERSION });
