//! Compiles a template's source to instructions that charge the memory budget before they allocate.

use std::collections::{BTreeMap, BTreeSet};

use minijinja::machinery::{CodeGenerator, Instruction, Instructions, ast, parse, parse_expr};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Error, ErrorKind};

use super::operators;

/// Maximum length of a template's source in bytes.
const MAX_SOURCE_BYTES: usize = 256 << 10;
/// Maximum length of a template's source that is compiled on the caller's stack: the syntax tree of a short source cannot be deep.
const SHORT_BYTES: usize = 400;
/// Stack size for compiling the deepest syntax tree that the longest source can have: `1+1+1+…`.
const STACK_BYTES: usize = 512 << 20;
/// Maximum depth of a template's syntax tree. At each level, the compiler visits all levels below.
const MAX_DEPTH: usize = 500;
/// Maximum total size in bytes of all constants that the template compiler computes.
const MAX_CONSTANTS: u64 = 4 << 20;

/// A compiled template, with a budget check before each instruction that allocates.
#[derive(Debug)]
pub struct Program<'a> {
    pub instructions: Instructions<'a>,
    pub blocks: BTreeMap<&'a str, Instructions<'a>>,
}

impl<'a> Program<'a> {
    /// Compiles the source of a template.
    pub fn template(name: &'a str, source: &'a str, syntax: &SyntaxConfig) -> Result<Self, Error> {
        on_a_large_stack(source, || {
            let tree = parse(source, name, syntax.clone())?;
            Check::default().statement(&tree, 0)?;
            let mut generator = CodeGenerator::new(name, source);
            generator.compile_stmt(&tree);
            let (instructions, blocks) = generator.finish();
            let blocks = blocks.into_iter().map(|(name, block)| Ok((name, insert_checks(&block)?)));
            Ok(Self { instructions: insert_checks(&instructions)?, blocks: blocks.collect::<Result<_, Error>>()? })
        })
    }

    /// Compiles a single expression, whose value is left on the stack.
    pub fn expression(source: &'a str) -> Result<Self, Error> {
        on_a_large_stack(source, || {
            let tree = parse_expr(source)?;
            Check::default().expression(&tree, 0)?;
            let mut generator = CodeGenerator::new("<expression>", source);
            generator.compile_expr(&tree);
            Ok(Self { instructions: insert_checks(&generator.finish().0)?, blocks: BTreeMap::new() })
        })
    }
}

fn refused(why: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::SyntaxError, why)
}

/// Runs `compile` on a large stack: parsing, compiling and dropping a tree need stack in proportion to its depth.
fn on_a_large_stack<T: Send>(source: &str, compile: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
    if source.len() > MAX_SOURCE_BYTES {
        return Err(refused(format!("the template is longer than {} KiB", MAX_SOURCE_BYTES >> 10)));
    }
    if source.len() <= SHORT_BYTES {
        return compile();
    }
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, compile);
        let thread =
            thread.map_err(|error| refused(format!("cannot start a thread to compile the template: {error}")))?;
        thread.join().map_err(|_| refused("the template cannot be compiled"))?
    })
}

/// Checks a template's syntax tree before it is compiled: depth, constants, and statements that are not allowed.
#[derive(Default)]
struct Check {
    constants: u64,
}

/// Upper bounds of a constant that the compiler computes: the size in bytes, and the magnitude of a number.
#[derive(Clone, Copy)]
struct Constant {
    bytes: u64,
    magnitude: f64,
}

impl Check {
    fn deeper(depth: usize) -> Result<usize, Error> {
        if depth >= MAX_DEPTH {
            return Err(refused(format!("the template is nested more than {MAX_DEPTH} levels deep")));
        }
        Ok(depth + 1)
    }

    fn statements(&mut self, statements: &[ast::Stmt<'_>], depth: usize) -> Result<(), Error> {
        statements.iter().try_for_each(|statement| self.statement(statement, depth))
    }

    fn statement(&mut self, statement: &ast::Stmt<'_>, depth: usize) -> Result<(), Error> {
        let depth = Self::deeper(depth)?;
        match statement {
            ast::Stmt::Template(node) => self.statements(&node.children, depth),
            ast::Stmt::EmitExpr(node) => self.expression(&node.expr, depth),
            ast::Stmt::EmitRaw(_) | ast::Stmt::Continue(_) | ast::Stmt::Break(_) => Ok(()),
            ast::Stmt::ForLoop(node) => {
                self.expressions([&node.target, &node.iter].into_iter().chain(&node.filter_expr), depth)?;
                self.statements(&node.body, depth)?;
                self.statements(&node.else_body, depth)
            }
            ast::Stmt::IfCond(node) => {
                self.expression(&node.expr, depth)?;
                self.statements(&node.true_body, depth)?;
                self.statements(&node.false_body, depth)
            }
            ast::Stmt::WithBlock(node) => {
                self.expressions(node.assignments.iter().flat_map(|(target, value)| [target, value]), depth)?;
                self.statements(&node.body, depth)
            }
            ast::Stmt::Set(node) => self.expressions([&node.target, &node.expr], depth),
            ast::Stmt::SetBlock(node) => {
                self.expressions([&node.target].into_iter().chain(&node.filter), depth)?;
                self.statements(&node.body, depth)
            }
            ast::Stmt::AutoEscape(node) => {
                self.expression(&node.enabled, depth)?;
                self.statements(&node.body, depth)
            }
            ast::Stmt::FilterBlock(node) => {
                self.expression(&node.filter, depth)?;
                self.statements(&node.body, depth)
            }
            ast::Stmt::Block(node) => self.statements(&node.body, depth),
            ast::Stmt::Import(_) | ast::Stmt::FromImport(_) | ast::Stmt::Extends(_) | ast::Stmt::Include(_) => {
                Err(refused("a template cannot import, extend or include another one"))
            }
            ast::Stmt::Macro(node) => self.callable(node, depth),
            ast::Stmt::CallBlock(node) => {
                self.call(&node.call, depth)?;
                self.callable(&node.macro_decl, depth)
            }
            ast::Stmt::Do(node) => self.call(&node.call, depth),
        }
    }

    fn callable(&mut self, node: &ast::Macro<'_>, depth: usize) -> Result<(), Error> {
        self.expressions(&node.defaults, depth)?;
        self.statements(&node.body, depth)
    }

    fn call(&mut self, node: &ast::Call<'_>, depth: usize) -> Result<(), Error> {
        self.expression(&node.expr, depth)?;
        self.arguments(&node.args, depth)
    }

    fn arguments(&mut self, arguments: &[ast::CallArg<'_>], depth: usize) -> Result<(), Error> {
        self.expressions(
            arguments.iter().map(|argument| match argument {
                ast::CallArg::Pos(value)
                | ast::CallArg::Kwarg(_, value)
                | ast::CallArg::PosSplat(value)
                | ast::CallArg::KwargSplat(value) => value,
            }),
            depth,
        )
    }

    fn expressions<'e, 's: 'e>(
        &mut self,
        expressions: impl IntoIterator<Item = &'e ast::Expr<'s>>,
        depth: usize,
    ) -> Result<(), Error> {
        expressions.into_iter().try_for_each(|expression| self.expression(expression, depth))
    }

    fn expression(&mut self, expression: &ast::Expr<'_>, depth: usize) -> Result<(), Error> {
        self.constant(expression, depth).map(|_| ())
    }

    /// Checks an expression of a template. If it has no variables, returns bounds of the constant that the compiler would compute.
    fn constant(&mut self, expression: &ast::Expr<'_>, depth: usize) -> Result<Option<Constant>, Error> {
        let depth = Self::deeper(depth)?;
        let constant = match expression {
            ast::Expr::Var(_) => None,
            ast::Expr::Const(node) => Some(Constant {
                bytes: 32 + node.value.as_str().map_or(0, str::len) as u64,
                magnitude: f64::try_from(node.value.clone()).unwrap_or(0.0).abs(),
            }),
            ast::Expr::Slice(node) => {
                let parts = [&node.start, &node.stop, &node.step].into_iter().flatten();
                self.expressions([&node.expr].into_iter().chain(parts), depth)?;
                None
            }
            ast::Expr::UnaryOp(node) => self.constant(&node.expr, depth)?,
            ast::Expr::BinOp(node) => {
                let left = self.constant(&node.left, depth)?;
                let right = self.constant(&node.right, depth)?;
                left.zip(right).map(|(left, right)| folded(node.op, left, right))
            }
            ast::Expr::Compare(node) => {
                let others = node.ops.iter().map(|other| &other.expr);
                self.all([&node.expr].into_iter().chain(others), depth)?
            }
            ast::Expr::IfExpr(node) => {
                let parts = [&node.test_expr, &node.true_expr].into_iter().chain(&node.false_expr);
                self.expressions(parts, depth)?;
                None
            }
            ast::Expr::Filter(node) => {
                self.expressions(&node.expr, depth)?;
                self.arguments(&node.args, depth)?;
                None
            }
            ast::Expr::Test(node) => {
                self.expression(&node.expr, depth)?;
                self.arguments(&node.args, depth)?;
                None
            }
            ast::Expr::GetAttr(node) => {
                self.expression(&node.expr, depth)?;
                None
            }
            ast::Expr::GetItem(node) => {
                self.expressions([&node.expr, &node.subscript_expr], depth)?;
                None
            }
            ast::Expr::Call(node) => {
                self.call(node, depth)?;
                None
            }
            ast::Expr::List(node) => self.all(&node.items, depth)?,
            ast::Expr::Tuple(node) => self.all(&node.items, depth)?,
            ast::Expr::Map(node) => self.all(node.keys.iter().chain(&node.values), depth)?,
        };
        if let (Some(constant), ast::Expr::BinOp(_)) = (constant, expression) {
            self.constants = self.constants.saturating_add(constant.bytes);
            if self.constants > MAX_CONSTANTS {
                return Err(refused(format!("the template has more than {} MiB of constants", MAX_CONSTANTS >> 20)));
            }
        }
        Ok(constant)
    }

    /// Returns bounds of a list or map literal if all its items are constants.
    fn all<'e, 's: 'e>(
        &mut self,
        expressions: impl IntoIterator<Item = &'e ast::Expr<'s>>,
        depth: usize,
    ) -> Result<Option<Constant>, Error> {
        let mut all = Some(Constant { bytes: 32, magnitude: 0.0 });
        for expression in expressions {
            let one = self.constant(expression, depth)?;
            all = all.zip(one).map(|(all, one)| Constant { bytes: all.bytes.saturating_add(one.bytes), ..all });
        }
        Ok(all)
    }
}

fn folded(op: ast::BinOpKind, left: Constant, right: Constant) -> Constant {
    let sum = left.bytes.saturating_add(right.bytes);
    let magnitude = left.magnitude + right.magnitude;
    match op {
        ast::BinOpKind::Mul => {
            // The cast to an integer saturates, so the product remains an upper bound.
            let times = |this: Constant, other: Constant| this.bytes.saturating_mul(other.magnitude.ceil() as u64);
            // The product of two numbers is a number; any other product, such as a repeated text, has no magnitude.
            let numbers = left.magnitude > 0.0 && right.magnitude > 0.0;
            let bytes = if numbers { 32 } else { times(left, right).max(times(right, left)).max(32) };
            Constant { bytes, magnitude: if numbers { left.magnitude * right.magnitude } else { 0.0 } }
        }
        ast::BinOpKind::Pow => Constant { bytes: 32, magnitude: left.magnitude.max(1.0).powf(right.magnitude) },
        ast::BinOpKind::Div | ast::BinOpKind::FloorDiv | ast::BinOpKind::Rem | ast::BinOpKind::Sub => {
            let magnitude = if right.magnitude < 1.0 { f64::INFINITY } else { magnitude };
            Constant { bytes: 32, magnitude }
        }
        // A constant written as text is at most as long as its source, times the length of the longest escape.
        ast::BinOpKind::Concat => {
            Constant { bytes: sum.saturating_mul(super::budget::MAX_ESCAPE_BYTES), magnitude: 0.0 }
        }
        _ => Constant { bytes: sum, magnitude: magnitude + 1.0 },
    }
}

/// Copies compiled instructions and inserts a budget check before each instruction that allocates.
fn insert_checks<'a>(plain: &Instructions<'a>) -> Result<Instructions<'a>, Error> {
    let instructions: Vec<&Instruction<'a>> = (0..).map_while(|index| plain.get(index)).collect();
    let mut targets = BTreeSet::new();
    for instruction in &instructions {
        targets.extend(target(&mut (*instruction).clone()).copied());
    }
    // The new position of each instruction, after the budget checks that are inserted before it.
    let mut places = Vec::with_capacity(instructions.len() + 1);
    let mut groups: Vec<Vec<Instruction<'a>>> = Vec::with_capacity(instructions.len());
    let mut place = 0;
    for (index, instruction) in (0u32..).zip(&instructions) {
        places.push(place);
        // The constant on top of the stack, if the previous instruction has pushed it and no jump leads here.
        let before = index.checked_sub(1).filter(|_| !targets.contains(&index)).and_then(|index| plain.get(index));
        let top = before.and_then(|before| if let Instruction::LoadConst(top) = before { Some(top) } else { None });
        let group = operators::with_checks(instruction, top)?;
        place += u32::try_from(group.len()).map_err(|_| refused("the compiled template has too many instructions"))?;
        groups.push(group);
    }
    places.push(place);
    let mut all = Instructions::new(plain.name(), plain.source());
    for (index, group) in (0u32..).zip(groups) {
        for mut instruction in group {
            if let Some(target) = target(&mut instruction) {
                *target = *places
                    .get(*target as usize)
                    .ok_or_else(|| refused("the compiled template has a jump without a target"))?;
            }
            match plain.get_span(index) {
                Some(span) => all.add_with_span(instruction, span),
                None => {
                    let line = plain.get_line(index).unwrap_or_default();
                    all.add_with_line(instruction, u16::try_from(line).unwrap_or(u16::MAX))
                }
            };
        }
    }
    Ok(all)
}

/// Returns the target index of a jump instruction.
fn target<'i>(instruction: &'i mut Instruction<'_>) -> Option<&'i mut u32> {
    match instruction {
        Instruction::Iterate(target)
        | Instruction::Jump(target)
        | Instruction::JumpIfFalse(target)
        | Instruction::JumpIfFalseOrPop(target)
        | Instruction::JumpIfTrueOrPop(target)
        | Instruction::BuildMacro(_, target, _) => Some(target),
        _ => None,
    }
}
