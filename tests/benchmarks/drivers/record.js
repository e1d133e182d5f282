// The record of what ran, as in record.py: (number, nanoseconds of the monotonic clock) for each execution.
const fs = require("fs");

const pair = Buffer.alloc(16);
let file;

function monotonic() {
  return process.hrtime.bigint();
}

function record(number) {
  file ??= fs.openSync(`${process.env.BENCH_RECORDS}/${process.pid}`, "a");
  pair.writeBigInt64LE(BigInt(number), 0);
  pair.writeBigInt64LE(monotonic(), 8);
  fs.writeSync(file, pair);
}

// What the drivers do with a queue that has single(number) and bulk(numbers); see common.py.
async function enqueue([word, ...rest], { single, bulk }) {
  const began = monotonic();
  const cpu = process.cpuUsage();
  const count = Number(rest[0]);
  if (word === "single") {
    for (let number = 0; number < count; number++) await single(number);
  } else if (word === "bulk") {
    for (let start = 0; start < count; start += 1000) {
      await bulk(Array.from({ length: Math.min(1000, count - start) }, (_, place) => start + place));
    }
  } else if (word === "paced") {
    const [, perSecond, first] = rest.map(Number);
    for (let place = 0; place < count; place++) {
      const due = (place / perSecond) * 1000 - Number(monotonic() - began) / 1e6;
      if (due > 0) await new Promise((resolve) => setTimeout(resolve, due));
      await single(first + place);
      record(first + place);
    }
  } else {
    throw new Error(`What is ${word}?`);
  }
  const { user, system } = process.cpuUsage(cpu);
  console.log(JSON.stringify({ seconds: Number(monotonic() - began) / 1e9, cpu_seconds: (user + system) / 1e6 }));
}

module.exports = { record, enqueue };
