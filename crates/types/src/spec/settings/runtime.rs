//! The settings of the runtime and of the devices.

use utoipa::PartialSchema;

use super::DefaultValue::{Flag, Variant, Whole};
use super::{Section, Setting};
use crate::spec::plan::{ResourcesPlan, RuntimePlan};

/// Maximum number of devices of one job.
const MAX_DEVICES: u64 = 64;

/// Returns the names by which a job chooses its runtime.
pub(in crate::spec) fn runtime_names() -> Vec<String> {
    ["own", "trl", "auto"].map(str::to_owned).to_vec()
}

pub(in crate::spec) static RUNTIME: Section = Section::new(
    "runtime",
    "Runtime",
    "The program that trains. A text such as \"trl\" is accepted in place of {\"name\": \"trl\"}.",
    &[
        Setting::variant("name", runtime_names)
            .doc("The program that trains: own = rlood's engine; trl = TRL's RLOOTrainer, for what only it can do; auto = own, or trl where only that can, decided when the job is accepted. Default: own.")
            .default(Variant("own")),
        Setting::flag("load_in_8bit").default(Flag(false)),
        Setting::whole("zero_stage", 2, 3).hint("leave it out to train without DeepSpeed"),
        Setting::flag("offload").default(Flag(false)),
    ],
)
.of_plan(RuntimePlan::schema);

pub(in crate::spec) static RESOURCES: Section = Section::new(
    "resources",
    "Resources",
    "The devices that the job needs.",
    &[Setting::whole("devices", 1, MAX_DEVICES).default(Whole(1))],
)
.of_plan(ResourcesPlan::schema);
