//! `docs/reference/cli.md` matches the `--help` texts.

use std::fmt::Write;

use clap::{Command, CommandFactory};
use rlood::config::Cli;

const PAGE: &str = "docs/reference/cli.md";

/// The commands that talk to a server: those of `rlood_cli`, and `keys`.
fn commands() -> Vec<Command> {
    let known = rlood_cli_names();
    let mut command = Cli::command();
    command.build();
    command.get_subcommands().filter(|one| known.contains(&one.get_name().to_owned())).cloned().collect()
}

fn rlood_cli_names() -> Vec<String> {
    let api = <rlood_cli::Command as clap::Subcommand>::augment_subcommands(Command::new("rlood"));
    let names = api.get_subcommands().map(|command| command.get_name().to_owned());
    names.chain(["keys".to_owned()]).collect()
}

fn escaped(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ").replace('<', "&lt;")
}

/// Describes a command with its positional arguments and flags; flags common to all commands are described once.
fn describe(page: &mut String, name: &str, command: &Command) {
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let mut usage = format!("rlood {name}");
    for argument in command.get_positionals() {
        let values = argument.get_value_names().unwrap_or_default();
        let value = values.iter().map(|value| value.as_str()).collect::<Vec<_>>().join(" ");
        let more = if argument.get_num_args().is_some_and(|count| count.max_values() > 1) { "…" } else { "" };
        let optional = !argument.is_required_set();
        write!(usage, " {}{value}{more}{}", if optional { "[" } else { "" }, if optional { "]" } else { "" }).unwrap();
    }
    writeln!(page, "### {name}\n\n`{usage}`: {}\n", escaped(&about)).unwrap();
    let of_all =
        |id: &str| ["server", "key", "profile", "json", "color", "log", "log_format", "help", "version"].contains(&id);
    let rows: Vec<_> = command
        .get_arguments()
        .filter(|argument| !of_all(argument.get_id().as_str()) && !argument.is_hide_set())
        .collect();
    if rows.is_empty() || command.has_subcommands() {
        return;
    }
    writeln!(page, "| | |\n|---|---|").unwrap();
    for argument in rows {
        let values = argument.get_value_names().unwrap_or_default();
        let value = values.first().filter(|_| argument.get_action().takes_values()).map(|value| format!(" {value}"));
        let flag = match (argument.get_long(), argument.get_short()) {
            (Some(long), Some(short)) => format!("-{short}, --{long}{}", value.unwrap_or_default()),
            (Some(long), None) => format!("--{long}{}", value.unwrap_or_default()),
            _ => values.first().map(ToString::to_string).unwrap_or_default(),
        };
        let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
        let defaults = argument.get_default_values().iter().map(|value| value.to_string_lossy()).collect::<Vec<_>>();
        let default = if defaults.is_empty() || !argument.get_action().takes_values() {
            String::new()
        } else {
            format!(". Default: {}", defaults.join(","))
        };
        writeln!(page, "| `{}` | {}{default} |", escaped(&flag), escaped(&help)).unwrap();
    }
    page.push('\n');
}

fn page() -> String {
    let mut page = String::from(
        "# Commands\n\nThis page is generated from `--help`. [The guide](../guides/command-line.md) shows each command in use.\n\n\
         ## Flags of every command\n\n| | |\n|---|---|\n",
    );
    let commands = commands();
    let list = commands.iter().find(|command| command.get_name() == "list").unwrap();
    for id in ["server", "key", "profile", "json", "color"] {
        let argument = list.get_arguments().find(|argument| argument.get_id() == id).unwrap();
        writeln!(page, "| `--{id}` | {} |", escaped(&argument.get_help().unwrap().to_string())).unwrap();
    }
    page.push_str(
        "\n## Exit codes\n\n| | |\n|---|---|\n| 0 | success |\n| 1 | the job failed, or the server returned an error |\n\
         | 2 | the command line, a file or the request is not valid |\n| 3 | not found |\n| 4 | not allowed |\n\
         | 5 | the server cannot be reached |\n| 6 | the job was cancelled |\n\
         | 7 | the job is paused (`--until-paused`) |\n\
         | 10 to 13 | `rlood verdict`: no difference shown, worse, the guard fell, too few rows |\n| 124 | `--timeout` |\n| 130 | Ctrl-C |\n\n## Commands\n\n",
    );
    for command in &commands {
        describe(&mut page, command.get_name(), command);
        for below in command.get_subcommands().filter(|below| below.get_name() != "help") {
            describe(&mut page, &format!("{} {}", command.get_name(), below.get_name()), below);
        }
    }
    page.trim_end().to_owned() + "\n"
}

#[test]
fn the_reference_page_is_what_help_says() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(PAGE);
    let page = page();
    if std::env::var_os("RLOOD_BLESS").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(found == page, "RLOOD_BLESS=1 cargo test --release --test it -- cli::pages writes {PAGE} again");
}

#[test]
fn the_guide_shows_every_command() {
    let guide = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/guides/command-line.md");
    let guide = std::fs::read_to_string(guide).unwrap();
    let missing: Vec<String> =
        rlood_cli_names().into_iter().filter(|name| !guide.contains(&format!("rlood {name}"))).collect();
    assert!(missing.is_empty(), "docs/guides/command-line.md does not show {missing:?}");
}
