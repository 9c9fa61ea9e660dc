//! Tests that the failpoints of the store are in a build with the feature `failpoints`, and in no other.

use std::cell::RefCell;
use std::rc::Rc;

use rlood_types::failpoint;

use crate::setting::{Setting, T0, plan};

#[tokio::test]
async fn points_are_reached_with_the_feature_and_not_without_it() {
    let setting = Setting::new().await;
    let reached = Rc::new(RefCell::new(Vec::new()));
    let noted = reached.clone();
    failpoint::set_hook(Some(Box::new(move |point| {
        noted.borrow_mut().push(point.to_owned());
        None
    })));
    let job = setting.job().await;
    setting.store.job_pause(job, T0).await.unwrap();
    failpoint::set_hook(None);
    let reached = reached.take();
    for kind in ["store.before_commit:", "store.after_commit:", "store.event:"] {
        let found = reached.iter().any(|point| point.starts_with(kind));
        assert_eq!(found, cfg!(feature = "failpoints"), "{kind} in {reached:?}");
    }
}

#[tokio::test]
async fn a_point_that_a_test_lets_fail_fails() {
    let setting = Setting::new().await;
    failpoint::set_hook(Some(Box::new(|point| {
        point.starts_with("store.before_commit").then_some(failpoint::Action::Error)
    })));
    let new = setting.job_of(&plan(setting.dataset), 0, T0).await;
    failpoint::set_hook(None);
    assert_eq!(new.is_err(), cfg!(feature = "failpoints"), "{new:?}");
}
