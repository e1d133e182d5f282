// Drives pg-boss.
const { PgBoss } = require("pg-boss");
const { record, enqueue } = require("./record.js");

const QUEUE = "noop";
const { notify, ...options } = JSON.parse(process.env.BENCH_OPTIONS || "{}");

async function main([word, ...rest]) {
  const isWorker = word === "worker";
  const boss = new PgBoss({
    connectionString: process.env.BENCH_URL,
    useListenNotify: Boolean(notify),
    ...(isWorker ? {} : { supervise: false, schedule: false }),
  });
  boss.on("error", (error) => console.error(error));
  await boss.start();
  if (isWorker) {
    await boss.work(QUEUE, options, async (jobs) => {
      for (const { data } of jobs) record(data.number);
    });
    return;
  }
  if (word === "install") {
    await boss.createQueue(QUEUE, { notify: true });
    console.log("{}");
  } else {
    await enqueue([word, ...rest], {
      single: (number) => boss.send(QUEUE, { number }),
      bulk: (numbers) => boss.insert(QUEUE, numbers.map((number) => ({ data: { number } }))),
    });
  }
  await boss.stop({ graceful: false });
  process.exit(0);
}

main(process.argv.slice(2)).catch((error) => {
  console.error(error);
  process.exit(1);
});
