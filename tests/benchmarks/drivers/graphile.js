// Drives graphile-worker.
const { Logger, makeWorkerUtils, run } = require("graphile-worker");
const { Pool } = require("pg");
const { record, enqueue } = require("./record.js");

const connectionString = process.env.BENCH_URL;
const options = JSON.parse(process.env.BENCH_OPTIONS || "{}");
const logger = new Logger(() => (level, message) => {
  if (level === "error") console.error(message);
});

async function install() {
  const utils = await makeWorkerUtils({ connectionString, logger });
  await utils.migrate();
  await utils.release();
  console.log("{}");
}

async function work() {
  const { batchDelay, ...rest } = options;
  const batches = batchDelay === undefined ? {} : { completeJobBatchDelay: batchDelay, failJobBatchDelay: batchDelay };
  const preset = { worker: { connectionString, logger, ...rest, ...batches } };
  const runner = await run({ preset, taskList: { noop: async ({ number }) => record(number) } });
  await runner.promise;
}

async function main([word, ...rest]) {
  if (word === "install") return install();
  if (word === "worker") return work();
  const pgPool = new Pool({ connectionString, max: 10 });
  const utils = await makeWorkerUtils({ pgPool, logger });
  await enqueue([word, ...rest], {
    single: (number) => utils.addJob("noop", { number }),
    bulk: (numbers) => utils.addJobs(numbers.map((number) => ({ identifier: "noop", payload: { number } }))),
  });
  await utils.release();
  await pgPool.end();
}

main(process.argv.slice(2)).catch((error) => {
  console.error(error);
  process.exit(1);
});
