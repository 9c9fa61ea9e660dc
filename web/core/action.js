// A hook for requests that a button or a form starts: whether one is running, and the error of the last one.
import { useState } from "./ui.js";

/**
 * Returns `{busy, error, setError, errorsAt, run, submit}`: `run(action)` calls an async function and keeps its error; `submit(action)` is
 * a form's `onSubmit` that does the same; `errorsAt(pointer)` returns the errors of a field.
 */
export function useAction() {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const run = async (action) => {
    setBusy(true);
    setError(null);
    try {
      await action();
    } catch (problem) {
      if (problem.name !== "AbortError") setError(problem);
    }
    setBusy(false);
  };
  const submit = (action) => (event) => {
    event.preventDefault();
    run(action);
  };
  return { busy, error, setError, run, submit, errorsAt: (pointer) => error?.errorsAt?.(pointer) ?? [] };
}
