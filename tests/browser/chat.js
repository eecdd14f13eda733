// A chat of Vercel's AI SDK without a page: `Chat` is what useChat shows. Started with the place of a conversation, it
// carries out the commands of standard input, and prints each state of the chat as a line of JSON.
import { Chat } from '@ai-sdk/react';
import { createInterface } from 'node:readline';
import { conversations, stored } from './transport.js';

const { api, accepts, id } = JSON.parse(process.argv[2]);
const chat = new Chat({
  id,
  messages: await stored({ api, id }),
  transport: conversations({ api, accepts: () => accepts }),
  onFinish: ({ isAbort, isError }) => isAbort || isError || chat.resumeStream(),
});
let done = 0;
let shown = '';
setInterval(() => {
  const state = JSON.stringify({ status: chat.status, messages: chat.messages, done });
  if (state !== shown) console.log((shown = state));
}, 10);
const commands = {
  resume: () => chat.resumeStream(),
  send: (text) => chat.sendMessage({ text }),
};
for await (const line of createInterface({ input: process.stdin })) {
  const { command, given } = JSON.parse(line);
  commands[command](given).then(() => (done += 1));
}
process.exit();
