//! The settings of a job: one table per section, one row per setting.
//!
//! Everything that lists settings reads these tables: the reader of documents (`read`), the JSON schema and the dashboard's form
//! (`schema`), the translation from TRL (`super::trl`), the settings that a fork must keep to resume (`super::fork`), the hints for
//! misplaced keys (`super::foreign`) and the reference page (`page`). A new setting is a field of its plan and a row here. Type and
//! description come from the plan's field, unless the row has its own description.

mod checkpoints;
mod environment;
mod eval;
mod lora;
mod optimizer;
mod page;
mod range;
mod read;
mod rloo;
mod rollout;
mod runtime;
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

pub(super) use checkpoints::{CERTIFICATE, CHECKPOINTS};
pub(super) use environment::ENVIRONMENT;
pub(super) use eval::{DEFAULT_MARGIN, EVAL, WARM_START};
pub(super) use lora::{ALL_LINEAR, LORA};
pub(super) use optimizer::OPTIMIZER;
pub use page::settings_page;
pub(super) use range::Range;
pub(super) use read::Values;
pub(super) use rloo::RLOO;
pub(super) use rollout::{MAX_WEIGHT, ROLLOUT};
pub(super) use runtime::{RESOURCES, RUNTIME, runtime_names};
pub(super) use sampling::{GREEDY, GREEDY_TEMPERATURE, SAMPLING};
pub(super) use schema::form_layout;
pub(super) use training::{MAX_SEED, MAX_STEPS, TRAINING};
pub(super) use warm_up::WARM_UP;
pub(super) use watch::{DOCTOR, EARLY_STOPPING};

/// All sections, in the order of the form and of the reference page.
pub(super) static SECTIONS: [&Section; 16] = [
    &TRAINING,
    &RLOO,
    &SAMPLING,
    &OPTIMIZER,
    &LORA,
    &EVAL,
    &CHECKPOINTS,
    &CERTIFICATE,
    &EARLY_STOPPING,
    &DOCTOR,
    &WARM_START,
    &WARM_UP,
    &ROLLOUT,
    &ENVIRONMENT,
    &RUNTIME,
    &RESOURCES,
];

/// A section of a job's document.
pub(super) struct Section {
    /// Key of the section in the document.
    pub name: &'static str,
    /// Display title of the section.
    pub title: &'static str,
    /// Description in the schema and on the reference page.
    pub doc: &'static str,
    /// Whether the section is off in a job that leaves it out. Otherwise its defaults apply.
    pub is_optional: bool,
    /// Schema of the section in the resolved plan. Rows without a description use its descriptions.
    pub plan: Option<fn() -> RefOr<Schema>>,
    /// Rows, in the order in which errors are reported.
    pub settings: &'static [Setting],
}

/// One setting: a row of a section's table.
#[derive(Clone, Copy)]
pub(super) struct Setting {
    /// Key of the setting in the section.
    pub name: &'static str,
    /// Other accepted spellings of the setting's key.
    pub aliases: &'static [&'static str],
    /// Type and limits of the value.
    pub kind: Kind,
    /// Value in a job that does not give the setting.
    pub default: DefaultValue,
    /// Error text for a missing required setting; `None` = optional.
    pub required: Option<&'static str>,
    /// Description; empty = that of the plan's field.
    pub doc: &'static str,
    /// Text appended to an error about the value: the reason, or what to use instead.
    pub hint: &'static str,
    /// Minimum of a whole number, if the minimum depends on other settings.
    pub lowest: Option<fn(&Values) -> u64>,
    /// Returns why the value conflicts with the settings that were read before.
    pub conflict: Option<fn(&Values, &Value) -> Option<String>>,
    /// Whether the setting is read before the others of its section, because their limits or defaults depend on it.
    pub is_first: bool,
    /// The corresponding setting of TRL.
    pub trl: Trl,
    /// Whether a fork may change the setting and still resume from the checkpoint.
    pub resume: Resume,
    /// Label in the form; empty = the name in words.
    pub label: &'static str,
    /// Position among the settings that the form always shows; 0 = only under "All settings".
    pub prominence: u8,
}

/// Type and limits of a setting.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    /// A boolean, true or false.
    Flag,
    /// A whole number between two limits, both included.
    Whole(u64, u64),
    /// A finite number within a range.
    Number(Range),
    /// A name of an enum's variant.
    Variant(fn() -> Vec<String>),
    /// Text that is not blank, with at most this many characters.
    Text(usize),
    /// A value with a separate reader and schema.
    Own {
        /// Checks the value and converts it to the form that the plan has.
        read: fn(&Field<'_>) -> Option<Value>,
        /// Schema of the value, without a description.
        schema: fn() -> RefOr<Schema>,
        /// Accepted values, in words.
        says: &'static str,
    },
    /// A part of the document that another reader handles after the table's settings.
    Part {
        /// Schema of this part of the document, with a description.
        schema: fn() -> RefOr<Schema>,
        /// Accepted values, in words.
        says: &'static str,
    },
}

/// The value of a setting that is not given.
#[derive(Clone, Copy)]
pub(super) enum DefaultValue {
    /// No value: null in the plan, or resolved later.
    Nothing,
    /// A boolean as the value.
    Flag(bool),
    /// A whole number as the value.
    Whole(u64),
    /// A floating-point number as the value.
    Number(f64),
    /// A name of an enum's variant.
    Variant(&'static str),
    /// A list of words as the value.
    Words(&'static [&'static str]),
    /// An empty object as the value.
    EmptyObject,
    /// A value that depends on settings read before, and the rule in words.
    Follows(fn(&Values) -> Value, &'static str),
}

/// The TRL setting that a setting here is translated from. TRL's default is given explicitly, because ours may differ.
#[derive(Clone, Copy)]
pub(super) enum Trl {
    /// TRL has no corresponding setting.
    Absent,
    /// TRL always behaves as with this value.
    Always(DefaultValue),
    /// TRL has the setting under one of these keys, of which the first that is present counts; with the value's
    /// form and TRL's default.
    Key(&'static [&'static str], Form, DefaultValue),
    /// An adapter's setting: the key and default of `trl.ModelConfig`, then those of `peft.LoraConfig`.
    Adapter(Form, (&'static str, DefaultValue), (&'static str, DefaultValue)),
    /// Several keys, or one with a different meaning, translated by a function of `super::trl`.
    Own(&'static [&'static str]),
}

/// How the value of a TRL key is read and written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// A number that is written as a float.
    Number,
    /// A number that is written as an integer if it has no fraction.
    Plain,
    /// A whole number of at least 1.
    Count,
    /// A boolean, true or false.
    Flag,
    /// Any value, without a conversion.
    AsSent,
    /// Module names as in PEFT.
    Modules,
}

/// Whether a run that resumes from another job's checkpoint must have the same value of a setting.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Resume {
    /// A run that resumes from another job's checkpoint may have another value.
    Free,
    /// The values must be equal. These rows and their order are part of a checkpoint's identity: a different order would
    /// invalidate every existing checkpoint.
    Fixed,
    /// The values must be equal. A checkpoint's identity contains the setting under `key`, unless it has `value`, which every job
    /// had before the setting existed.
    FixedUnless {
        /// Key of the setting in a checkpoint's identity.
        key: &'static str,
        /// Value of the setting at which a checkpoint's identity leaves the setting out.
        value: &'static str,
    },
    /// The values must be equal; `super::fork` compares them in a form of its own.
    FixedInOwnForm,
}

impl Section {
    /// Creates a section of settings that every job has.
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

    const fn variant(name: &'static str, names: fn() -> Vec<String>) -> Self {
        Self::new(name, Kind::Variant(names))
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
    /// Returns a default value as JSON; `read` has the values of the settings that `Follows` depends on.
    pub(super) fn value(self, read: &Values) -> Value {
        match self {
            Self::Nothing => Value::Null,
            Self::Flag(flag) => json!(flag),
            Self::Whole(number) => json!(number),
            Self::Number(number) => json!(number),
            Self::Variant(word) => json!(word),
            Self::Words(words) => json!(words),
            Self::EmptyObject => json!({}),
            Self::Follows(rule, _) => rule(read),
        }
    }
}

impl Trl {
    /// Returns the keys of TRL's arguments that correspond to the setting.
    pub(super) fn keys(self) -> Vec<&'static str> {
        match self {
            Self::Absent | Self::Always(_) => Vec::new(),
            Self::Key(keys, ..) | Self::Own(keys) => keys.to_vec(),
            Self::Adapter(_, (flat, _), _) => vec![flat],
        }
    }
}

/// Returns the names of an enum's variants, as its schema lists them.
pub(super) fn variant_names<T: PartialSchema>() -> Vec<String> {
    let RefOr::T(Schema::Object(schema)) = T::schema() else { return Vec::new() };
    let words = schema.enum_values.unwrap_or_default();
    words.iter().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// Returns the serialized name of an enum's variant.
pub(super) fn variant_name(variant: impl serde::Serialize) -> String {
    json!(variant).as_str().unwrap_or_default().to_owned()
}
