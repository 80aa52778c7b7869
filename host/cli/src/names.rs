//! Suggestions for a VM name that no VM has.
//!
//! Before: a request for a VM failed. After: an error on which the operator can act. Promise: any other error is
//! unchanged.

use ballast_api::{Client, ClientError};

use crate::exit::{Coded, Exit};

pub fn explain(client: &Client, name: &str, error: ClientError) -> anyhow::Error {
    if !error.is_no_such_vm() {
        return error.into();
    }
    let names: Vec<String> = client.vms().unwrap_or_default().into_iter().map(|vm| vm.name).collect();
    Coded { exit: Exit::NoSuchVm, message: format!("No VM is named {name:?}; {}", suggestion(name, &names)) }.into()
}

fn suggestion(name: &str, names: &[String]) -> String {
    const MOST: usize = 3;
    const FEW: usize = 5;
    let wanted = name.to_lowercase();
    let far = wanted.len().div_ceil(3);
    let mut near: Vec<(usize, &str)> = names
        .iter()
        .filter_map(|known| {
            let lower = known.to_lowercase();
            let distance = strsim::damerau_levenshtein(&wanted, &lower);
            let part = !wanted.is_empty() && (lower.contains(&wanted) || wanted.contains(&lower));
            (distance <= far || part).then_some((distance, known.as_str()))
        })
        .collect();
    near.sort_unstable();
    let near: Vec<&str> = near.into_iter().take(MOST).map(|(_, known)| known).collect();
    match (near.is_empty(), names.is_empty()) {
        (false, _) => format!("did you mean {}?", near.join(" or ")),
        (true, true) => "none is attached".into(),
        (true, false) if names.len() <= FEW => format!("there is {}", names.join(", ")),
        (true, false) => format!("there are {} others: see `ballast vm list`", names.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistyped_name_gets_the_nearest_ones() {
        let names: Vec<String> = ["web-1", "web-2", "db"].map(String::from).into();
        assert_eq!(suggestion("wbe-1", &names), "did you mean web-1 or web-2?");
        assert_eq!(suggestion("WEB", &names), "did you mean web-1 or web-2?");
        assert_eq!(suggestion("mailserver", &names), "there is web-1, web-2, db");
        assert_eq!(
            suggestion("mailserver", &[names.as_slice(), &names].concat()),
            "there are 6 others: see `ballast vm list`"
        );
        assert_eq!(suggestion("x", &[]), "none is attached");
    }
}
