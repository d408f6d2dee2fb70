// Talks to a server through the Vercel AI SDK and prints what it got as JSON. Usage: node chat.js URL KEY
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, apiKey] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "cllm", baseURL: `${url}/v1`, apiKey, supportsStructuredOutputs: true });
const model = provider("fake");

const plain = streamText({ model, prompt: "hello" });
const pieces = [];
for await (const piece of plain.textStream) pieces.push(piece);

const cities = [];
const weather = tool({
  description: "The weather",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => {
    cities.push(city);
    return `${city}: fine`;
  },
});
const withTools = streamText({ model, prompt: "How is the weather in Oslo and in Rome?", tools: { weather }, stopWhen: stepCountIs(2) });
await withTools.consumeStream();

const person = z.object({ name: z.string(), age: z.number().int() });
const structured = await generateObject({ model, prompt: "Which person?", schema: person });

console.log(
  JSON.stringify({
    n_pieces: pieces.length,
    text: pieces.join(""),
    finish: await plain.finishReason,
    cities,
    after_tools: await withTools.text,
    person: structured.object,
  }),
);
