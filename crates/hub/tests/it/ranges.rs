use std::sync::atomic::{AtomicU32, Ordering};

use rlood_hub::HubError;

use super::fake::{COMMIT, Faults, Running, model, start};
use super::plans::tiny;

const SHARD: &str = "model-00001-of-00002.safetensors";

async fn read(running: &Running) -> Result<Option<Vec<Vec<u8>>>, HubError> {
    let hub = running.client();
    let info = hub.info(&tiny()).await?;
    let file = info.files.iter().find(|file| file.path == SHARD).unwrap();
    hub.read_ranges(&tiny(), COMMIT, file, &[199_990..200_000, 5..5, 10..20, 100_000..150_000]).await
}

#[tokio::test]
async fn ranges_come_in_their_order_and_nothing_else_is_sent() {
    for faults in [
        Faults::default(),
        Faults { unavailable: AtomicU32::new(3), ..Faults::default() },
        Faults { cut_after: Some(5), cuts: AtomicU32::new(2), ..Faults::default() },
    ] {
        let running = start(model(), faults).await;
        let parts = read(&running).await.unwrap().unwrap();
        let file = &running.fake.files[SHARD];
        assert_eq!(parts, [&file[199_990..], &[], &file[10..20], &file[100_000..150_000]]);
        assert!(running.fake.sent_bytes.load(Ordering::SeqCst) <= 50_020 * 3);
    }
}

#[tokio::test]
async fn missing_and_wrong_ranges_are_detected() {
    for faults in [
        Faults { ignores_ranges: true, ..Faults::default() },
        Faults { forbids_ranges: true, ..Faults::default() },
        Faults { shifts_ranges: true, ..Faults::default() },
    ] {
        assert_eq!(read(&start(model(), faults).await).await.unwrap(), None);
    }
    let moved = start(model(), Faults { moved: true, ..Faults::default() }).await;
    assert!(matches!(read(&moved).await, Err(HubError::CommitMoved { .. })));
}
