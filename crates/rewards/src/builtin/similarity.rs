//! Similarity of two texts, from 0 to 1, by the metrics of OpenAI's `text_similarity` grader.

use std::collections::HashMap;

use rapidfuzz::distance::{indel, lcs_seq};

use crate::spec::SimilarityMetric;

/// Maximum number of characters of a text that the similarity metrics compare. The rest of a longer text is ignored.
const MAX_CHARS: usize = 50_000;
/// Length in words of the longest n-grams that BLEU and GLEU count.
const MAX_ORDER: usize = 4;

/// Returns the similarity of `input` to `reference` by one of the metrics, from 0 to 1.
pub(super) fn similarity(input: &str, reference: &str, metric: SimilarityMetric) -> f64 {
    let cut = |text: &str| text.chars().take(MAX_CHARS).collect::<String>();
    let (input, reference) = (cut(input), cut(reference));
    match metric {
        SimilarityMetric::FuzzyMatch => indel::normalized_similarity(input.chars(), reference.chars()),
        SimilarityMetric::Bleu => bleu(&words(&input), &words(&reference)),
        SimilarityMetric::Gleu => gleu(&words(&input), &words(&reference)),
        SimilarityMetric::Rouge1 => rouge_n(&input, &reference, 1),
        SimilarityMetric::Rouge2 => rouge_n(&input, &reference, 2),
        SimilarityMetric::Rouge3 => rouge_n(&input, &reference, 3),
        SimilarityMetric::Rouge4 => rouge_n(&input, &reference, 4),
        SimilarityMetric::Rouge5 => rouge_n(&input, &reference, 5),
        SimilarityMetric::RougeL => rouge_l(&input, &reference),
    }
}

fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

/// Splits a text into words as the Python package rouge-score does: lower case, letters and digits.
fn rouge_words(text: &str) -> Vec<String> {
    let lower = text.to_lowercase();
    let words = lower.split(|c: char| !c.is_alphanumeric());
    words.filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

fn counts<T: Eq + std::hash::Hash>(words: &[T], order: usize) -> HashMap<&[T], usize> {
    let mut counts = HashMap::new();
    for ngram in words.windows(order) {
        *counts.entry(ngram).or_insert(0) += 1;
    }
    counts
}

/// Counts the n-grams that two texts share. An n-gram counts as often as it occurs in the text that has fewer of it.
fn shared<T: Eq + std::hash::Hash>(left: &[T], right: &[T], order: usize) -> usize {
    let other = counts(right, order);
    counts(left, order).into_iter().map(|(ngram, count)| count.min(other.get(ngram).copied().unwrap_or(0))).sum()
}

fn ngrams(words: usize, order: usize) -> usize {
    (words + 1).saturating_sub(order)
}

/// BLEU of one sentence (Papineni et al. 2002). Counts for two and more words are smoothed by one (Lin and Och 2004).
fn bleu(input: &[&str], reference: &[&str]) -> f64 {
    if input.is_empty() || reference.is_empty() {
        return f64::from(u8::from(input == reference));
    }
    let mut log_sum = 0.0;
    for order in 1..=MAX_ORDER {
        let smoothing = if order == 1 { 0.0 } else { 1.0 };
        let hits = shared(input, reference, order) as f64 + smoothing;
        let total = ngrams(input.len(), order) as f64 + smoothing;
        if hits == 0.0 {
            return 0.0;
        }
        log_sum += (hits / total).ln();
    }
    let brevity = (1.0 - reference.len() as f64 / input.len() as f64).min(0.0);
    (brevity + log_sum / MAX_ORDER as f64).exp()
}

/// GLEU (Wu et al. 2016): the lower of precision and recall over all n-grams of up to four words.
fn gleu(input: &[&str], reference: &[&str]) -> f64 {
    let (mut hits, mut of_input, mut of_reference) = (0, 0, 0);
    for order in 1..=MAX_ORDER {
        hits += shared(input, reference, order);
        of_input += ngrams(input.len(), order);
        of_reference += ngrams(reference.len(), order);
    }
    match of_input.max(of_reference) {
        0 => 1.0,
        longest => hits as f64 / longest as f64,
    }
}

/// ROUGE-N as F1 (Lin 2004).
fn rouge_n(input: &str, reference: &str, order: usize) -> f64 {
    let (input, reference) = (rouge_words(input), rouge_words(reference));
    let hits = shared(&input, &reference, order) as f64;
    f1(hits, ngrams(input.len(), order), ngrams(reference.len(), order))
}

fn rouge_l(input: &str, reference: &str) -> f64 {
    let (input, reference) = (rouge_words(input), rouge_words(reference));
    let mut numbers: HashMap<&str, u32> = HashMap::new();
    let mut ids = [&input, &reference].map(|_| Vec::new());
    for (words, ids) in [&input, &reference].into_iter().zip(&mut ids) {
        for word in words {
            let next = numbers.len() as u32;
            ids.push(*numbers.entry(word).or_insert(next));
        }
    }
    let common = lcs_seq::similarity(ids[0].iter().copied(), ids[1].iter().copied());
    f1(common as f64, input.len(), reference.len())
}

fn f1(hits: f64, of_input: usize, of_reference: usize) -> f64 {
    if hits == 0.0 {
        return 0.0;
    }
    let (precision, recall) = (hits / of_input as f64, hits / of_reference as f64);
    2.0 * precision * recall / (precision + recall)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(input: &str, reference: &str, metric: SimilarityMetric, expected: f64) {
        let found = similarity(input, reference, metric);
        assert!((found - expected).abs() < 1e-9, "{input} / {reference}, {metric:?}: {found}, not {expected}");
    }

    #[test]
    fn the_measures_are_their_definitions() {
        use SimilarityMetric::{Bleu, FuzzyMatch, Gleu, Rouge1, Rouge2, Rouge5, RougeL};
        // The words "kitten" and "sitting" (13 letters) share the four letters i, t, t, n: 2 · 4 / 13.
        near("kitten", "sitting", FuzzyMatch, 8.0 / 13.0);
        // The texts "the cat the cat on the mat" and "the cat is on the mat" share 5 words: 5 of 7 and 5 of 6.
        let (input, reference) = ("the cat the cat on the mat", "the cat is on the mat");
        near(input, reference, Rouge1, 2.0 * (5.0 / 7.0) * (5.0 / 6.0) / (5.0 / 7.0 + 5.0 / 6.0));
        // The two texts share the word pairs "the cat", "on the", "the mat": 3 of 6 and 3 of 5.
        near(input, reference, Rouge2, 2.0 * 0.5 * 0.6 / 1.1);
        near(input, reference, RougeL, 2.0 * (5.0 / 7.0) * (5.0 / 6.0) / (5.0 / 7.0 + 5.0 / 6.0));
        near(input, reference, Rouge5, 0.0);
        // GLEU: 5, 3, 1 ("on the mat") and 0 of the input's 7 + 6 + 5 + 4 n-grams of one to four words match; the reference has 6 +
        // 5 + 4 + 3.
        near(input, reference, Gleu, 9.0 / 22.0);
        let precisions: [f64; 4] = [5.0 / 7.0, 4.0 / 7.0, 2.0 / 6.0, 1.0 / 5.0];
        near(input, reference, Bleu, precisions.iter().product::<f64>().powf(0.25));
        // BLEU: the brevity penalty is exp(1 − 6/3). Every word matches; smoothed precisions are 3/3 of pairs, 2/2 of triples, 1/1.
        near("the cat is", reference, Bleu, (-1.0f64).exp());
        near("The CAT, is on the mat!", reference, Rouge1, 1.0);
    }

    #[test]
    fn likeness_is_between_0_and_1_whatever_the_texts() {
        use SimilarityMetric::{Bleu, FuzzyMatch, Gleu, Rouge1, Rouge2, Rouge3, Rouge4, Rouge5, RougeL};
        let texts = ["", " ", "a", "a b c d e f", "ä ö ü", "a a a a a a a", "1.5 ± 2"];
        for metric in [FuzzyMatch, Bleu, Gleu, Rouge1, Rouge2, Rouge3, Rouge4, Rouge5, RougeL] {
            for left in texts {
                for right in texts {
                    let found = similarity(left, right, metric);
                    assert!((0.0..=1.0 + 1e-12).contains(&found), "{metric:?} {left:?} {right:?}: {found}");
                }
            }
            near("one two three four five", "one two three four five", metric, 1.0);
        }
    }
}
