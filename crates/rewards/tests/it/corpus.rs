//! Addresses that a server must not reach, in many notations, and listeners that count connections.

use std::net::Ipv6Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Addresses of every non-public kind. The port is that of the test's listeners, so that a
/// connection to loopback would succeed.
pub const FORBIDDEN: [[u8; 4]; 26] = [
    [127, 0, 0, 1],
    [127, 0, 0, 2],
    [127, 255, 255, 254],
    [0, 0, 0, 0],
    [0, 1, 2, 3],
    [10, 0, 0, 1],
    [10, 255, 255, 255],
    [172, 16, 0, 1],
    [172, 31, 255, 254],
    [192, 168, 0, 1],
    [192, 168, 255, 255],
    [169, 254, 169, 254],
    [169, 254, 170, 2],
    [100, 64, 0, 1],
    [100, 100, 100, 200],
    [168, 63, 129, 16],
    [192, 0, 0, 192],
    [192, 0, 2, 1],
    [192, 88, 99, 1],
    [198, 18, 0, 1],
    [198, 51, 100, 7],
    [203, 0, 113, 9],
    [224, 0, 0, 1],
    [239, 255, 255, 250],
    [240, 0, 0, 1],
    [255, 255, 255, 255],
];

/// Returns the notations of one address.
fn notations([a, b, c, d]: [u8; 4]) -> Vec<String> {
    let number = u32::from_be_bytes([a, b, c, d]);
    let (low3, low2) = (number & 0xff_ffff, number & 0xffff);
    let dotted = format!("{a}.{b}.{c}.{d}");
    let other_digits = |zero: u32| -> String {
        let digit = |c: char| c.to_digit(10).and_then(|digit| char::from_u32(zero + digit)).unwrap_or(c);
        dotted.chars().map(digit).collect()
    };
    let (high, low) = (number >> 16, number & 0xffff);
    vec![
        dotted.clone(),
        format!("{dotted}."),
        format!("{number}"),
        format!("0x{number:x}"),
        format!("0X{number:08X}"),
        format!("0{number:o}"),
        format!("0x{a:x}.0x{b:x}.0x{c:x}.0x{d:x}"),
        format!("0{a:o}.0{b:o}.0{c:o}.0{d:o}"),
        format!("0000{a:o}.0{b:o}.{c}.0x{d:x}"),
        format!("{a}.{low3}"),
        format!("{a}.{b}.{low2}"),
        format!("0x{a:x}.0x{low3:x}"),
        dotted.bytes().map(|byte| format!("%{byte:02x}")).collect(),
        dotted.replace('.', "%2e"),
        dotted.replace('.', "。"),
        dotted.replace('.', "．"),
        other_digits(0xff10),
        other_digits(0x1d7ce),
        other_digits(0x1d7f6),
        format!("[::ffff:{dotted}]"),
        format!("[::ffff:{high:x}:{low:x}]"),
        format!("[0:0:0:0:0:ffff:{high:x}:{low:x}]"),
        format!("[::ffff:0:{dotted}]"),
        format!("[::{dotted}]"),
        format!("[64:ff9b::{dotted}]"),
        format!("[64:ff9b:1::{high:x}:{low:x}]"),
        format!("[2002:{high:x}:{low:x}::1]"),
        format!("[2001:0:4136:e378:8000:63bf:{:x}:{:x}]", !high & 0xffff, !low & 0xffff),
    ]
}

/// Names that resolve to this machine, and tricks with other parts of a URL. `PORT` is replaced by the listeners' port.
const OTHERS: [&str; 44] = [
    "http://localhost:PORT/",
    "http://localhost.:PORT/",
    "http://LOCALHOST:PORT/",
    "http://lOcAlHoSt:PORT/",
    "http://ⓛⓞⓒⓐⓛⓗⓞⓢⓣ:PORT/",
    "http://ｌｏｃａｌｈｏｓｔ:PORT/",
    "http://%6c%6f%63%61%6c%68%6f%73%74:PORT/",
    "https://localhost:PORT/",
    "http://ip6-localhost:PORT/",
    "http://[::1]:PORT/",
    "http://[0:0:0:0:0:0:0:1]:PORT/",
    "http://[0000:0000:0000:0000:0000:0000:0000:0001]:PORT/",
    "http://[::]:PORT/",
    "http://[0::0]:PORT/",
    "http://[fe80::1]:PORT/",
    "http://[fe80::1%25lo]:PORT/",
    "http://[::1%25lo]:PORT/",
    "http://[fc00::1]:PORT/",
    "http://[fd00:ec2::254]:PORT/latest/meta-data/",
    "http://[fd20:ce::254]:PORT/computeMetadata/v1/",
    "http://[fec0::1]:PORT/",
    "http://[ff02::1]:PORT/",
    "http://[2001:db8::1]:PORT/",
    "http://[3fff::1]:PORT/",
    "http://[100::1]:PORT/",
    "http://[2001:2::1]:PORT/",
    "http://[5f00::1]:PORT/",
    "http://0:PORT/",
    "http://0x0:PORT/",
    "http://00000000000:PORT/",
    "http://user@127.0.0.1:PORT/",
    "http://public.example@127.0.0.1:PORT/",
    "http://public.example:80@127.0.0.1:PORT/",
    "http://public.example%40127.0.0.1:PORT/",
    "http://127.0.0.1:PORT#@public.example/",
    "http://127.0.0.1:PORT?@public.example/",
    "http://127.0.0.1:PORT\\@public.example/",
    "http:\\\\127.0.0.1:PORT\\",
    "http:/127.0.0.1:PORT/",
    "http:127.0.0.1:PORT/",
    "\thttp://127.0.0.1:PORT/",
    "http://127.0.\t0.1:PORT/",
    "gopher://127.0.0.1:PORT/_GET",
    "file:///proc/self/environ",
];

/// Accepts connections on IPv4 and IPv6 loopback, and counts them.
pub struct Home {
    pub port: u16,
    count: Arc<AtomicUsize>,
}

impl Home {
    pub async fn start() -> Self {
        let first = tokio::net::TcpListener::bind("0.0.0.0:0").await.unwrap();
        let port = first.local_addr().unwrap().port();
        let count = Arc::new(AtomicUsize::new(0));
        let second = tokio::net::TcpListener::bind((Ipv6Addr::LOCALHOST, port)).await;
        for listener in [Some(first), second.ok()].into_iter().flatten() {
            let count = count.clone();
            tokio::spawn(async move {
                while listener.accept().await.is_ok_and(|_| {
                    count.fetch_add(1, Ordering::SeqCst);
                    true
                }) {}
            });
        }
        Self { port, count }
    }

    pub fn connections(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }

    pub fn corpus(&self) -> Vec<String> {
        let literals = FORBIDDEN.into_iter().flat_map(notations);
        let mut urls: Vec<String> = literals.map(|host| format!("http://{host}:{}/score", self.port)).collect();
        urls.extend(OTHERS.iter().map(|url| url.replace("PORT", &self.port.to_string())));
        urls
    }
}
