// Streams tokens through the npm package resumable-stream, with one follower of each stream: live.py runs it.
//
//   npm install --prefix FOLDER resumable-stream redis
//   node deploy/load/resumable.mjs FOLDER URL STREAMS TOKENS SECONDS     # TOKENS: a second and stream
//
// The package keeps the tokens in the writer's memory, so Redis only publishes them. The figure depends on how many
// streams share the writer's connection, because the server reads all commands that have arrived at once.
// Writes one line of JSON: the number of tokens, the seconds, and those of the server's CPU meanwhile.

import { createRequire } from "node:module";
import { resolve } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";

const [folder, url, ...numbers] = process.argv.slice(2);
const [streams, rate, seconds] = numbers.map(Number);
const count = Math.floor(rate * seconds);
const require = createRequire(`${resolve(folder)}/`);
const { createClient } = require("redis");
const { createResumableStreamContext } = require("resumable-stream/redis");

const clients = [];

async function connected() {
  const client = createClient({ url });
  clients.push(client);
  await client.connect();
  return client;
}

// The streams and their followers have connections of their own, as if they were in two processes.
async function context() {
  const [publisher, subscriber] = [await connected(), await connected()];
  return createResumableStreamContext({ waitUntil: () => {}, publisher, subscriber });
}

async function usedCpu(client) {
  const found = await client.info("cpu");
  return ["user", "sys"].reduce((sum, part) => sum + Number(found.match(`used_cpu_${part}:([0-9.]+)`)[1]), 0);
}

async function received(stream) {
  let characters = 0;
  for await (const text of stream) characters += text.length;
  return characters;
}

const [writing, following, admin] = [await context(), await context(), await connected()];
const controllers = [];
for (let at = 0; at < streams; at++) {
  const source = new ReadableStream({ start: (controller) => void controllers.push(controller) });
  await writing.createNewResumableStream(`s${at}`, () => source);
}
const followers = [];
for (let at = 0; at < streams; at++) followers.push(received(await following.resumeExistingStream(`s${at}`)));

const [used, began] = [await usedCpu(admin), performance.now()];
let sent = 0;
await Promise.all(
  controllers.map(async (controller, number) => {
    for (let at = 0; at < count; at++) {
      const due = began + ((at + number / streams) / rate) * 1000;
      await sleep(Math.max(0, due - performance.now()));
      const token = (performance.now() / 1000).toFixed(6).padStart(12, "0");
      sent += token.length;
      controller.enqueue(token);
    }
  }),
);
const result = { chunks: count * streams, seconds: (performance.now() - began) / 1000, cpu: (await usedCpu(admin)) - used };
for (const controller of controllers) controller.close();
const seen = (await Promise.all(followers)).reduce((sum, each) => sum + each, 0);
if (seen !== sent) throw new Error(`the followers received ${seen} of ${sent} characters`);
console.log(JSON.stringify(result));
for (const client of clients) await client.close();
