// What is known about one token: its numbers, and in one sentence why it did or did not train.
// `read(name)` gives the token's value in a column: undefined where the export lacks the column.

// A token that nobody sampled has no probability under the inference weights; exports hold a fill there.
const AGAINST_INFERENCE = new Set([
  "inference_logprobs",
  "importance_ratio",
  "mismatch_kl",
  "prob_delta",
  "policy_versions",
]);

const DETAILS = [
  ["trainer logprob", "trainer_logprobs"],
  ["inference logprob", "inference_logprobs"],
  ["importance ratio", "importance_ratio"],
  ["mismatch KL", "mismatch_kl"],
  ["prob. delta", "prob_delta"],
  ["entropy", "entropy"],
  ["advantage", "advantages"],
  ["token loss", "token_loss"],
  ["policy version", "policy_versions"],
];

function detailsOf(read, index, text) {
  const numbers = DETAILS.map(([label, name]) => {
    const value = read(name);
    if (value === undefined) return [label, "not recorded", "absent"];
    if (AGAINST_INFERENCE.has(name) && read("sampled") === 0) return [label, "not sampled", "absent"];
    return value === null ? [label, "none", "absent"] : [label, precise(value)];
  });
  const id = String(read("token_ids"));
  return [
    ["id", id],
    text === `#${id}` ? ["text", "not decoded", "absent"] : ["text", JSON.stringify(text)],
    ["position", String(read("position_ids") ?? index)],
    ...numbers,
    ["mask", ...maskWords(read)],
  ];
}

function maskSide(read) {
  if (!read("is_masked")) return null;
  return read("is_masked_high") ? "high" : read("is_masked_low") ? "low" : "neither";
}

function maskWords(read) {
  if (read("is_masked") === undefined) return ["not recorded", "absent"];
  if (read("is_masked") === null || !read("loss_mask")) return ["none", "absent"];
  return [{ high: "masked high", low: "masked low", neither: "masked" }[maskSide(read)] ?? "kept"];
}

// [state, sentence]
function reason(read, index, mode) {
  const trainable = read("loss_mask");
  if (trainable === undefined) return ["Unknown", "This export has no loss mask: whether the token trained is not recorded."];
  if (!trainable) return untrainableReason(read, index);
  const advantage = read("advantages") ?? null;
  const side = maskSide(read);
  if (side) return maskedReason(side, advantage, read("prob_delta") ?? null);
  if (mode === "sft") return ["Trained", "A supervised target: its loss is −log π."];
  if (mode === "opd") return ["Trained", "Distilled: the teacher's logprob minus the trainer's is its advantage."];
  if (read("is_masked") === undefined) return ["Trainable", "In the loss mask; whether the trust region kept it is not recorded."];
  if (advantage === null) return ["Trained", "Inside the trust region; its advantage is not recorded."];
  if (advantage === 0) return ["Trained", "Its advantage is 0, so only a KL term, if the loss has one, moves it."];
  const push = `pushes its probability ${advantage > 0 ? "up" : "down"}`;
  return ["Trained", `Inside the trust region: its advantage ${signed(advantage, 3)} ${push}.`];
}

function untrainableReason(read, index) {
  const sampled = read("sampled");
  if (sampled) return ["Not trainable", "Sampled, but masked out by the environment or trained in another branch."];
  if (index === 0) return ["Context", "The first token of a sequence has no prediction, so there is nothing to train."];
  if (sampled === 0) return ["Context", "Prompt or tool output: the policy did not sample it."];
  return ["Not trainable", "Outside the loss mask: prompt, tool output, or masked out by the environment."];
}

function maskedReason(side, advantage, delta) {
  const measured = delta === null ? "" : ` (prob. delta ${signed(delta, 3)})`;
  const pull = advantage === null ? "Its advantage" : `Its advantage ${signed(advantage, 3)}`;
  const kept = "only a KL term, if the loss has one, still moves it.";
  const because = {
    high: `${pull} would raise a probability already too far above the one sampled from${measured}; ${kept}`,
    low: `${pull} would lower a probability already too far below the one sampled from${measured}; ${kept}`,
    neither: `It is out of the trust region${measured}; ${kept}`,
  };
  return [{ high: "Masked high", low: "Masked low", neither: "Masked" }[side], because[side]];
}
