// What a press of a button sets going: whether it goes on, and what the server said against it.
import { useState } from "./ui.js";

/** `{busy, error, setError, at, run, submit}`: `run(work)` waits for it; `submit(work)` is that as a form's `onSubmit`; `at(pointer)` is what is wrong at a field. */
export function useWork() {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const run = async (work) => {
    setBusy(true);
    setError(null);
    try {
      await work();
    } catch (problem) {
      if (problem.name !== "AbortError") setError(problem);
    }
    setBusy(false);
  };
  const submit = (work) => (event) => {
    event.preventDefault();
    run(work);
  };
  return { busy, error, setError, run, submit, at: (pointer) => error?.at?.(pointer) ?? [] };
}
