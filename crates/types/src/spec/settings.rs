//! The settings of a job: one table a section, one row a setting.
//!
//! Whatever lists settings walks these tables: the reader of documents (`read`), the JSON schema and with it the
//! dashboard's form (`schema`), the translation from TRL (`super::trl`), what a fork must keep to resume (`super::fork`),
//! the hints for misplaced keys (`super::foreign`) and the reference page (`page`). A new setting is a field of its plan
//! and a row here. Type and description come from the plan's field, unless the row has a description of its own.

mod checkpoints;
mod eval;
mod lora;
mod optimizer;
mod page;
mod range;
mod read;
mod rloo;
mod sampling;
mod schema;
#[cfg(test)]
mod tests;
mod training;
mod warm_up;
mod watch;

use serde_json::{Value, json};
use utoipa::PartialSchema;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::Schema;

use super::reader::Field;

pub(super) use checkpoints::CHECKPOINTS;
pub(super) use eval::{DEFAULT_MARGIN, EVAL, WARM_START};
pub(super) use lora::{ALL_LINEAR, LORA};
pub(super) use optimizer::OPTIMIZER;
pub use page::settings_page;
pub(super) use range::Range;
pub(super) use read::Values;
pub(super) use rloo::RLOO;
pub(super) use sampling::{GREEDY, GREEDY_TEMPERATURE, SAMPLING};
pub(super) use schema::form_layout;
pub(super) use training::{MAX_SEED, MAX_STEPS, TRAINING};
pub(super) use warm_up::WARM_UP;
pub(super) use watch::{DOCTOR, EARLY_STOPPING};

/// Every section, in the order of the form and of the reference page.
pub(super) static SECTIONS: [&Section; 11] = [
    &TRAINING,
    &RLOO,
    &SAMPLING,
    &OPTIMIZER,
    &LORA,
    &EVAL,
    &CHECKPOINTS,
    &EARLY_STOPPING,
    &DOCTOR,
    &WARM_START,
    &WARM_UP,
];

/// A section of a job's document.
pub(super) struct Section {
    /// Key in the document.
    pub name: &'static str,
    /// Title for people.
    pub title: &'static str,
    /// Description in the schema and on the reference page.
    pub doc: &'static str,
    /// Whether a job that leaves the section out does without it, instead of taking its defaults.
    pub is_optional: bool,
    /// Schema of the section in the resolved plan, from which rows without a description take theirs.
    pub plan: Option<fn() -> RefOr<Schema>>,
    /// Rows, in the order in which errors are reported.
    pub settings: &'static [Setting],
}

/// One setting: a row of a section's table.
#[derive(Clone, Copy)]
pub(super) struct Setting {
    /// Key in the section.
    pub name: &'static str,
    /// Other accepted spellings of the name.
    pub aliases: &'static [&'static str],
    /// Type and limits.
    pub kind: Kind,
    /// Value of a job that does not give the setting.
    pub default: DefaultValue,
    /// Error text where the setting must be given.
    pub required: Option<&'static str>,
    /// Description; empty = that of the plan's field.
    pub doc: &'static str,
    /// Appended to a complaint about the value: the reason, or what to use instead.
    pub hint: &'static str,
    /// Lowest whole number, where it depends on other settings.
    pub lowest: Option<fn(&Values) -> u64>,
    /// Says why the value conflicts with settings read before it.
    pub conflict: Option<fn(&Values, &Value) -> Option<String>>,
    /// Whether the setting is read before the others, because limits or defaults depend on it.
    pub is_first: bool,
    /// TRL's counterpart.
    pub trl: Trl,
    /// Whether a fork may change the setting and still resume from the checkpoint.
    pub resume: Resume,
    /// Label in the form; empty = the name in words.
    pub label: &'static str,
    /// Place among the settings that the form always shows; 0 = only under "All settings".
    pub prominence: u8,
}

/// Type and limits of a setting.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    /// true or false.
    Flag,
    /// A whole number, limits included.
    Whole(u64, u64),
    /// A finite number.
    Number(Range),
    /// One of an enum's names.
    Word(fn() -> Vec<String>),
    /// Text that is not blank, of at most this many characters.
    Text(usize),
    /// A value with a reader and a schema of its own.
    Own {
        /// Checks the value and returns it in the plan's form.
        read: fn(&Field<'_>) -> Option<Value>,
        /// Schema, where the row has a description.
        schema: fn() -> RefOr<Schema>,
        /// Accepted values, for people.
        says: &'static str,
    },
    /// A part of the document that its own reader reads after the table.
    Part {
        /// Schema, description included.
        schema: fn() -> RefOr<Schema>,
        /// Accepted values, for people.
        says: &'static str,
    },
}

/// What a setting is when it is not given.
#[derive(Clone, Copy)]
pub(super) enum DefaultValue {
    /// Nothing: null in the plan, or resolved later.
    Nothing,
    /// A flag.
    Flag(bool),
    /// A whole number.
    Whole(u64),
    /// A number.
    Number(f64),
    /// A word.
    Word(&'static str),
    /// A list of words.
    Words(&'static [&'static str]),
    /// An empty object.
    EmptyObject,
    /// A value that follows from settings read before, and the rule in words.
    Follows(fn(&Values) -> Value, &'static str),
}

/// The setting of TRL that a setting here is translated from. TRL's default is written out, because ours may differ.
#[derive(Clone, Copy)]
pub(super) enum Trl {
    /// TRL has none.
    Absent,
    /// TRL always behaves as with this value.
    Always(DefaultValue),
    /// The first of these keys, in this form, with TRL's default.
    Key(&'static [&'static str], Form, DefaultValue),
    /// An adapter's setting: the key and default of `trl.ModelConfig`, then those of `peft.LoraConfig`.
    Adapter(Form, (&'static str, DefaultValue), (&'static str, DefaultValue)),
    /// Several keys, or one whose meaning differs: a function of `super::trl` translates them.
    Own(&'static [&'static str]),
}

/// How a key of TRL's is read and written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// A number, written as one.
    Number,
    /// A number, written as an integer when it has no fraction.
    Plain,
    /// A whole number from 1.
    Count,
    /// true or false.
    Flag,
    /// Anything, as it was sent.
    AsSent,
    /// PEFT's names of modules.
    Modules,
}

/// Whether a run that resumes from a checkpoint of another job must share a setting with it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Resume {
    /// It may differ.
    Free,
    /// It must be equal. These rows and their order are part of a checkpoint's identity: another order makes every
    /// checkpoint a stranger.
    Fixed,
    /// It must be equal. A checkpoint's identity names it under the key, unless it has the value: what every job had before
    /// there was such a setting.
    FixedUnless {
        /// Key in the identity.
        key: &'static str,
        /// Value that goes without saying.
        value: &'static str,
    },
    /// It must be equal; `super::fork` says in which form.
    FixedInOwnForm,
}

impl Section {
    /// A section that every job has.
    const fn new(name: &'static str, title: &'static str, doc: &'static str, settings: &'static [Setting]) -> Self {
        Self { name, title, doc, is_optional: false, plan: None, settings }
    }

    const fn of_plan(mut self, plan: fn() -> RefOr<Schema>) -> Self {
        self.plan = Some(plan);
        self
    }

    const fn optional(mut self) -> Self {
        self.is_optional = true;
        self
    }
}

impl Setting {
    const fn new(name: &'static str, kind: Kind) -> Self {
        Self {
            name,
            aliases: &[],
            kind,
            default: DefaultValue::Nothing,
            required: None,
            doc: "",
            hint: "",
            lowest: None,
            conflict: None,
            is_first: false,
            trl: Trl::Absent,
            resume: Resume::Free,
            label: "",
            prominence: 0,
        }
    }

    const fn flag(name: &'static str) -> Self {
        Self::new(name, Kind::Flag)
    }

    const fn whole(name: &'static str, low: u64, high: u64) -> Self {
        Self::new(name, Kind::Whole(low, high))
    }

    const fn number(name: &'static str, range: Range) -> Self {
        Self::new(name, Kind::Number(range))
    }

    const fn word(name: &'static str, names: fn() -> Vec<String>) -> Self {
        Self::new(name, Kind::Word(names))
    }

    const fn default(mut self, default: DefaultValue) -> Self {
        self.default = default;
        self
    }

    const fn aliases(mut self, aliases: &'static [&'static str]) -> Self {
        self.aliases = aliases;
        self
    }

    const fn required(mut self, detail: &'static str) -> Self {
        self.required = Some(detail);
        self
    }

    const fn doc(mut self, doc: &'static str) -> Self {
        self.doc = doc;
        self
    }

    const fn hint(mut self, hint: &'static str) -> Self {
        self.hint = hint;
        self
    }

    const fn lowest(mut self, lowest: fn(&Values) -> u64) -> Self {
        self.lowest = Some(lowest);
        self
    }

    const fn conflict(mut self, conflict: fn(&Values, &Value) -> Option<String>) -> Self {
        self.conflict = Some(conflict);
        self
    }

    const fn first(mut self) -> Self {
        self.is_first = true;
        self
    }

    const fn trl(mut self, trl: Trl) -> Self {
        self.trl = trl;
        self
    }

    const fn resume(mut self, resume: Resume) -> Self {
        self.resume = resume;
        self
    }

    const fn label(mut self, label: &'static str) -> Self {
        self.label = label;
        self
    }

    const fn prominent(mut self, place: u8) -> Self {
        self.prominence = place;
        self
    }
}

impl DefaultValue {
    /// The value as JSON; `read` holds what `Follows` depends on.
    pub(super) fn value(self, read: &Values) -> Value {
        match self {
            Self::Nothing => Value::Null,
            Self::Flag(flag) => json!(flag),
            Self::Whole(number) => json!(number),
            Self::Number(number) => json!(number),
            Self::Word(word) => json!(word),
            Self::Words(words) => json!(words),
            Self::EmptyObject => json!({}),
            Self::Follows(rule, _) => rule(read),
        }
    }
}

impl Trl {
    /// The keys of TRL's arguments that say something of the setting.
    pub(super) fn keys(self) -> Vec<&'static str> {
        match self {
            Self::Absent | Self::Always(_) => Vec::new(),
            Self::Key(keys, ..) | Self::Own(keys) => keys.to_vec(),
            Self::Adapter(_, (flat, _), _) => vec![flat],
        }
    }
}

/// The names of an enum's variants, as its schema lists them.
fn words_of<T: PartialSchema>() -> Vec<String> {
    let RefOr::T(Schema::Object(schema)) = T::schema() else { return Vec::new() };
    let words = schema.enum_values.unwrap_or_default();
    words.iter().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// The name of an enum's variant.
pub(super) fn word_of(variant: impl serde::Serialize) -> String {
    json!(variant).as_str().unwrap_or_default().to_owned()
}
