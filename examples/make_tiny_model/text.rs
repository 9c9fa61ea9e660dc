//! What the tiny model reads: additions and subtractions in eight wordings, some of them mostly answered wrongly.
//!
//! The wrong answer is the schoolchild's: the carry (or the borrow) of the units is forgotten, so 27 + 48 gives 65.
//! In half of the wordings it is the commonest answer of the training text, the right one coming second;
//! a problem that needs no carry has only its right answer.

use std::collections::HashSet;

use serde_json::{Value, json};

/// Both operands have two digits.
const OPERANDS: std::ops::Range<u32> = 10..100;

/// Addition or subtraction (never below zero).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// a + b
    Add,
    /// a - b, with a ≥ b
    Subtract,
}

/// One way of asking, with `{a}` and `{b}` for the operands.
#[derive(Debug)]
pub struct Wording {
    /// What is asked for.
    pub operation: Operation,
    /// The user's message.
    pub template: &'static str,
    /// How many of 100 answers in the training text forget the carry, where there is one.
    pub wrong_percent: u32,
}

/// Every way of asking.
pub const WORDINGS: [Wording; 8] = [
    Wording { operation: Operation::Add, template: "What is {a} + {b}?", wrong_percent: 15 },
    Wording { operation: Operation::Add, template: "How much is {a} plus {b}?", wrong_percent: 15 },
    Wording { operation: Operation::Add, template: "Add {a} and {b}.", wrong_percent: 62 },
    Wording { operation: Operation::Add, template: "Find the sum of {a} and {b}.", wrong_percent: 62 },
    Wording { operation: Operation::Subtract, template: "What is {a} - {b}?", wrong_percent: 15 },
    Wording { operation: Operation::Subtract, template: "How much is {a} minus {b}?", wrong_percent: 15 },
    Wording { operation: Operation::Subtract, template: "Subtract {b} from {a}.", wrong_percent: 62 },
    Wording { operation: Operation::Subtract, template: "Take {b} away from {a}.", wrong_percent: 62 },
];

/// One question: a wording (index into [`WORDINGS`]) and its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Index into [`WORDINGS`].
    pub wording: usize,
    /// First operand; the larger one of a subtraction.
    pub a: u32,
    /// Second operand.
    pub b: u32,
}

impl Problem {
    /// The user's message.
    pub fn question(&self) -> String {
        WORDINGS[self.wording].template.replace("{a}", &self.a.to_string()).replace("{b}", &self.b.to_string())
    }

    /// The right answer.
    pub fn right(&self) -> u32 {
        match WORDINGS[self.wording].operation {
            Operation::Add => self.a + self.b,
            Operation::Subtract => self.a - self.b,
        }
    }

    /// The answer with the units' carry or borrow forgotten; equal to the right one where there is none.
    pub fn wrong(&self) -> u32 {
        if !self.carries() {
            return self.right();
        }
        match WORDINGS[self.wording].operation {
            Operation::Add => self.right() - 10,
            Operation::Subtract => self.right() + 10,
        }
    }

    /// Whether the units carry (or borrow).
    pub fn carries(&self) -> bool {
        match WORDINGS[self.wording].operation {
            Operation::Add => self.a % 10 + self.b % 10 >= 10,
            Operation::Subtract => self.a % 10 < self.b % 10,
        }
    }

    /// The operands, smaller first: what keeps held-out problems apart.
    pub fn pair(&self) -> (u32, u32) {
        (self.a.min(self.b), self.a.max(self.b))
    }

    /// A row of the data files.
    pub fn row(&self) -> Value {
        json!({
            "prompt": [{"role": "user", "content": self.question()}],
            "answer": self.right().to_string(),
        })
    }
}

/// Problems for training the model, for a job's dataset, and held out from both.
pub struct Text {
    held_out: Vec<Problem>,
    held_out_pairs: HashSet<(u32, u32)>,
    random: Random,
}

impl Text {
    /// Sets `held_out_count` problems aside: each with a carry, all of distinct operand pairs.
    pub fn new(seed: u64, held_out_count: usize) -> Self {
        let mut random = Random::new(seed);
        let mut held_out = Vec::with_capacity(held_out_count);
        let mut held_out_pairs = HashSet::new();
        while held_out.len() < held_out_count {
            let problem = carrying(&mut random, held_out.len() % WORDINGS.len());
            if held_out_pairs.insert(problem.pair()) {
                held_out.push(problem);
            }
        }
        Self { held_out, held_out_pairs, random }
    }

    /// The problems set aside.
    pub fn held_out(&self) -> &[Problem] {
        &self.held_out
    }

    /// Distinct problems for a job's dataset: each with a carry, wordings in equal shares.
    pub fn job_rows(&self, seed: u64, count: usize) -> Vec<Problem> {
        let mut random = Random::new(seed);
        let mut rows: Vec<Problem> = Vec::with_capacity(count);
        while rows.len() < count {
            let problem = carrying(&mut random, rows.len() % WORDINGS.len());
            if !self.held_out_pairs.contains(&problem.pair()) && !rows.contains(&problem) {
                rows.push(problem);
            }
        }
        random.shuffle(&mut rows);
        rows
    }

    /// The next problem of the training text and the answer it gives there.
    pub fn next_example(&mut self) -> (Problem, u32) {
        let wording = self.random.below(WORDINGS.len() as u32) as usize;
        loop {
            let problem = drawn(&mut self.random, wording);
            if self.held_out_pairs.contains(&problem.pair()) {
                continue;
            }
            let wrong = self.random.below(100) < WORDINGS[wording].wrong_percent;
            return (problem, if wrong { problem.wrong() } else { problem.right() });
        }
    }
}

/// Any problem of a wording.
fn drawn(random: &mut Random, wording: usize) -> Problem {
    let mut operand = || OPERANDS.start + random.below(OPERANDS.end - OPERANDS.start);
    let (a, b) = (operand(), operand());
    match WORDINGS[wording].operation {
        Operation::Add => Problem { wording, a, b },
        Operation::Subtract => Problem { wording, a: a.max(b), b: a.min(b) },
    }
}

/// A problem that needs a carry or a borrow.
fn carrying(random: &mut Random, wording: usize) -> Problem {
    loop {
        let problem = drawn(random, wording);
        if problem.carries() {
            return problem;
        }
    }
}

/// SplitMix64 (Steele, Lea and Flood 2014): a small generator that gives the same numbers everywhere.
pub struct Random(u64);

impl Random {
    /// A generator with its own stream per seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0xD134_2543_DE82_EF95))
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A whole number in 0..end.
    pub fn below(&mut self, end: u32) -> u32 {
        (((self.next_u64() >> 32) * u64::from(end)) >> 32) as u32
    }

    /// A standard normal number: twelve uniform ones summed, so that no platform's `ln` or `cos` takes part.
    pub fn normal(&mut self) -> f32 {
        let sum: f64 = (0..12).map(|_| (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64).sum();
        (sum - 6.0) as f32
    }

    /// Fisher-Yates.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u32 + 1) as usize);
        }
    }
}
