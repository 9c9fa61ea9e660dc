//! Checks that the named fail points of checkpoints exist in a build with the feature `failpoints`, and in no other.

use std::cell::RefCell;
use std::rc::Rc;

use rlood_types::failpoint;

use crate::train::{TestHost, plan, run};

#[test]
fn points_are_reached_with_the_feature_and_not_without_it() {
    let reached = Rc::new(RefCell::new(Vec::new()));
    let noted = reached.clone();
    failpoint::set_hook(Some(Box::new(move |point| {
        noted.borrow_mut().push(point.to_owned());
        None
    })));
    run(&plan(), &mut TestHost::default());
    failpoint::set_hook(None);
    let reached = reached.take();
    for kind in ["checkpoint.file:", "checkpoint.manifest", "checkpoint.renamed"] {
        let found = reached.iter().any(|point| point.starts_with(kind));
        assert_eq!(found, cfg!(feature = "failpoints"), "{kind} in {reached:?}");
    }
}
