// What every Node.js client script is written with; reports as checking.py does: a JSON line for each check.
"use strict";
const assert = require("node:assert/strict");

const CHECK_LIMIT_MS = 90_000;
const REASON_CHARS = 400;
const server = JSON.parse(process.env.COMPATIBILITY_SERVER);

// A check that cannot be asked of this server; the message says why.
class NotRun extends Error {}

function cameOverTime(times) {
  const spread = times.length ? times[times.length - 1] - times[0] : 0;
  assert.ok(times.length >= 4 && spread >= 20, `a stream of ${times.length} pieces within ${spread.toFixed(0)} ms`);
}

// Run all checks in order, or those named on the command line. `versions`: of packages and programs, by name.
async function run(checks, versions) {
  const only = process.argv.slice(2);
  console.log(JSON.stringify({ checks: Object.keys(checks), versions: { ...versions, node: process.versions.node } }));
  for (const [check, work] of Object.entries(checks)) {
    if (only.length && !only.some((word) => check.includes(word))) continue;
    const began = performance.now();
    let outcome = "pass", reason = "", timer;
    try {
      const late = new Promise((_, reject) => {
        timer = setTimeout(() => reject(new Error("no end after 90 s")), CHECK_LIMIT_MS);
      });
      await Promise.race([work(), late]);
    } catch (error) {
      outcome = error instanceof NotRun ? "not run" : "fail";
      reason = `${error.constructor.name}: ${String(error.message).split(/\s+/).join(" ")}`.slice(0, REASON_CHARS);
      if (error instanceof NotRun) reason = error.message;
    } finally {
      clearTimeout(timer);
    }
    console.log(JSON.stringify({ check, outcome, reason, took_s: Math.round((performance.now() - began) / 10) / 100 }));
  }
  process.exit(0);
}

module.exports = { NotRun, assert, cameOverTime, run, server };
