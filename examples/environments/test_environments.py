"""Tests of the examples: python3 -m unittest test_environments (in this folder)."""

import os
import time
import unittest
from fractions import Fraction

import calculator
import code_runner
import twenty_questions
import wordle


def said(content):
    return {"role": "assistant", "content": content}


class CalculatorTest(unittest.TestCase):
    def compute(self, text):
        return calculator.Calculator().calculate(text)

    def test_expressions_are_computed_exactly(self):
        for text, value in [
            ("2 + 3 * 4", "14"),
            ("(2+3)*4", "20"),
            ("0.1 + 0.2", "0.3"),
            ("1/3", "1/3"),
            ("1/3 + 1/6", "0.5"),
            ("-2 ** 2", "-4"),
            ("2 ** 3 ** 2", "512"),
            ("2 ^ -2", "0.25"),
            ("--3", "3"),
            ("-1/8", "-0.125"),
            ("123456789 * 987654321", "121932631112635269"),
        ]:
            self.assertEqual(self.compute(text), value, text)

    def test_what_is_no_expression_is_named(self):
        for text, part in [
            ("", "a number is missing"),
            ("1 +", "a number is missing"),
            ("(1", "not closed"),
            ("1 2", "not expected"),
            ("1)", "not expected"),
            ("1/0", "division by zero"),
            ("0 ** -1", "division by zero"),
            ("__import__('os')", "no number"),
            ("9 ** 9 ** 9", "exponent"),
            ("2 ** 0.5", "exponent"),
            ("1" * 1001, "longer than"),
            ("(" * 60 + "1" + ")" * 60, "too deep"),
            ("9" * 900 + "**3", "exponent"),
        ]:
            with self.assertRaisesRegex(ValueError, part, msg=text):
                self.compute(text)

    def test_the_last_number_is_the_answer(self):
        for answer, text, reward in [
            ("14", "First 20, then 14.", 1.0),
            (0.5, "It is 1/2", 1.0),
            ("1234567", "1,234,567", 1.0),
            ("-3", "The result is -3.", 1.0),
            ("14", "It is 15.", 0.0),
            ("14", "I do not know.", 0.0),
            ("14", "1/0", 0.0),
        ]:
            game = calculator.Calculator()
            game.reset({"answer": answer}, 1)
            self.assertEqual(game.step(said(text)), (None, reward, True), text)

    def test_numbers_are_written_as_they_are(self):
        for value, text in [(Fraction(5), "5"), (Fraction(-1, 4), "-0.25"), (Fraction(1, 10), "0.1"), (Fraction(22, 7), "22/7")]:
            self.assertEqual(calculator.shown(value), text)


class WordleTest(unittest.TestCase):
    def test_letters_are_marked(self):
        for word, guess, marks in [
            ("crane", "crane", "GGGGG"),
            ("crane", "nacre", "YYYYG"),
            ("plant", "paper", "GY---"),
            ("apple", "paper", "YYGY-"),
            ("sugar", "grass", "YYYY-"),
        ]:
            self.assertEqual(wordle.marks(word, guess), marks, (word, guess))

    def test_the_seed_picks_the_word_and_guesses_are_paid(self):
        words = set()
        for seed in range(20):
            game, same = wordle.Wordle(), wordle.Wordle()
            self.assertEqual(game.reset({}, seed), same.reset({}, seed))
            self.assertEqual(game.word, same.word)
            words.add(game.word)
        self.assertGreater(len(words), 5)
        game.reset({"word": "crane"}, 1)
        self.assertEqual(game.step(said("I try nacre")), ("nacre: YYYYG", None, False))
        self.assertEqual(game.step(said("It is CRANE.")), ("Right!", 0.95, True))
        game.reset({"word": "crane"}, 1)
        for _ in range(5):
            self.assertEqual(game.step(said("hm"))[1:], (None, False))
        self.assertEqual(game.step(said("nacre"))[1:], (0.5 * (1 + 0.5 * 4) / 5, True))
        game.reset({"word": "crane"}, 1)
        self.assertEqual(game.step(said("no idea"), final=True)[1:], (0.0, True))


class TwentyQuestionsTest(unittest.TestCase):
    def play(self, thing):
        game = twenty_questions.TwentyQuestions()
        game.reset({"thing": thing}, 1)
        return game

    def test_questions_are_answered(self):
        game = self.play("whale")
        for question, answer in [
            ("Is it alive?", "Yes."),
            ("Does it have wheels?", "No."),
            ("Is it big?", "Yes."),
            ("Does it have wings?", "No."),
            ("Is it a shark?", "No, it is no shark."),
        ]:
            self.assertEqual(game.step(said(question)), answer, question)
        self.assertTrue(game.step(said("Hello!")).startswith("Ask for one of: alive, "))
        self.assertEqual(game.step(said("Then it is a whale!")), ("Yes, it is!", 1.0, True))

    def test_the_last_guess_is_paid_by_closeness(self):
        near = self.play("knife").step(said("A spoon?"), final=True)[1]
        far = self.play("knife").step(said("A whale?"), final=True)[1]
        self.assertTrue(0.5 > near > far >= 0.0, (near, far))
        self.assertEqual(self.play("knife").step(said("Hm."), final=True)[1], 0.0)
        game = self.play("knife")
        for _ in range(19):
            game.step(said("Is it alive?"))
        self.assertEqual(game.step(said("Is it alive?"))[1:], (0.0, True))

    def test_the_seed_picks_the_thing(self):
        things = set()
        for seed in range(40):
            game = twenty_questions.TwentyQuestions()
            game.reset({}, seed)
            things.add(game.thing)
        self.assertGreater(len(things), 10)


class CodeRunnerTest(unittest.TestCase):
    def setUp(self):
        self.game = code_runner.CodeRunner()
        self.game.reset({"output": 42}, 1)

    def test_the_first_line_says_what_it_is_not(self):
        self.assertTrue(code_runner.__doc__.startswith("NO SANDBOX"))

    def test_a_program_is_run_and_its_output_paid(self):
        self.assertEqual(self.game.run_python("print(6 * 7)"), "42")
        self.assertEqual(self.game.step(said("42")), (None, 1.0, True))
        self.game.reset({"output": 42}, 1)
        self.assertIn("ZeroDivisionError", self.game.run_python("print(42)\n1 / 0"))
        self.assertEqual(self.game.step(said("42")), (None, 0.0, True), "a program that failed is not paid")
        self.assertEqual(self.game.run_python("pass"), "[no output]")

    def test_limits_hold(self):
        begun = time.monotonic()
        self.assertIn("[it was", self.game.run_python("while True: pass"))
        self.assertIn("stopped after 5 s", self.game.run_python("import time; print('on', flush=True); time.sleep(60)"))
        self.assertLess(time.monotonic() - begun, 15)
        self.assertIn("MemoryError", self.game.run_python("x = bytearray(1 << 30)"))
        printed = self.game.run_python("print('x' * 100000)")
        self.assertTrue(printed.endswith("[the output was cut]") and len(printed) < 9000)
        self.assertIn("[", self.game.run_python("open('big', 'wb').write(b'x' * (2 << 20))"))
        self.assertEqual(self.game.run_python("import os; print(sorted(os.environ))"), "['HOME', 'LC_CTYPE', 'PATH', 'TMPDIR']")

    def test_nothing_is_left(self):
        self.game.run_python("open('left', 'w').write('x')")
        folder = self.game.run_python("import os; print(os.getcwd(), os.listdir())")
        self.assertTrue(folder.endswith("[]"), folder)
        self.assertFalse(os.path.exists(folder.split()[0]))
        # A process that the program starts ends with it.
        code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid)"
        started = self.game.run_python(code)
        if not started.isdigit():
            # The limit counts all processes of the user, who may have many.
            return self.assertIn("Resource temporarily unavailable", started)
        pid = int(started)
        for _ in range(100):
            try:
                with open("/proc/%d/stat" % pid) as file:
                    if file.read().split()[2] == "Z":
                        break
            except FileNotFoundError:
                break
            time.sleep(0.05)
        else:
            self.fail("process %d still runs" % pid)


if __name__ == "__main__":
    unittest.main()
